# Every target sets up .venv by itself; a second call finds it done. Works offline once packages are installed.
PYTHON ?= python3
# A plain `torch` brings the CUDA build on Linux. `make TORCH=torch` takes it; any version in setup.cfg's range works.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export DS_BUILD_OPS := 0
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo test test-all check format bench bench-all gpu clean
help:
	@echo "make demo      prepare a corpus, train three denoisers, decode, measure, export: runs/demo/report.md (12 minutes, 2 cores)"
	@echo "make test      the tests (10 minutes, 2 cores);  make test-all adds the slow ones (80 minutes)"
	@echo "make check     format, lint, types"
	@echo "make bench     loader and tokenizer; training and denoising steps beside their floor;  bench-all adds other models;  make gpu: CUDA"
	@echo "make clean     removes runs/ and .venv"

install: $(STAMP)
$(STAMP): setup.cfg pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $(STAMP)

demo: install
	$(BIN)/python -m mezzotint.launch.demo

# two workers with one thread each: spinning threads on busy cores cost more than they bring; files in the order of conftest.py
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow or not slow"

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/check_types.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m mezzotint.eval.bench_data
	$(BIN)/python -m mezzotint.eval.bench

bench-all: bench
	$(BIN)/python -m mezzotint.eval.bench --row-length 4096 --batch 1 --contexts "" --out runs/bench/long
	$(BIN)/python -m mezzotint.eval.bench --size 125m --layers 2 --out runs/bench/wide
	$(BIN)/python -m mezzotint.eval.bench_peers

# eight minutes at most: tests marked gpu, full steps beside their plan, passes beside their floors; runs/gpu/gpu.md
gpu: install
	$(BIN)/python -m mezzotint.launch.gpu

clean:
	rm -rf runs $(VENV) build *.egg-info
