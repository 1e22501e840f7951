"""A small prepared corpus and a small recipe, for the tests that train."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml
from data_support import small_tokenizer

from mezzotint.data.manifest import Manifest
from mezzotint.data.shards import ShardWriter, token_dtype
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.training.config import TrainConfig, load_recipe

WORDS = (
    "def",
    "return",
    "self",
    "value",
    "for",
    "in",
    "range",
    "print",
    "area",
    "(",
    ")",
    ":",
    "=",
    "+",
    "1",
    "2",
    "\n",
)


@functools.cache
def corpus() -> Path:
    """A folder with train/ and heldout/, prepared with one tokenizer; made once a process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="mezzotint-corpus-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tokenizer_folder = small_tokenizer(folder / "tokenizer")
    random = np.random.default_rng(0)
    for name, documents in (("train", 60), ("heldout", 20)):
        texts = [" ".join(random.choice(WORDS, size=random.integers(5, 60))) for _ in range(documents)]
        write_texts(folder / name, texts, tokenizer_folder)
    return folder


def write_texts(folder: Path, texts: list[str], tokenizer_folder: Path) -> None:
    """A prepared folder of one shard, one document a text."""
    tokenizer = load_tokenizer(tokenizer_folder)
    folder.mkdir(parents=True)
    shutil.copy(tokenizer.files[0], folder)
    dtype = token_dtype(tokenizer.vocab_size)
    writer = ShardWriter(folder, "part-00000", dtype)
    for text in texts:
        ids = np.array([*tokenizer.encode(text), tokenizer.eos_id])
        writer.add(ids, np.array([len(ids)]), text_bytes=len(text.encode()))
    Manifest(
        folder=folder,
        source="test",
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        tokenizer=tokenizer.files[0].name,
        tokenizer_sha256=tokenizer.sha256,
        shards=(writer.close(),),
    ).write()


def recipe_file(folder: Path, **changes: object) -> Path:
    """A recipe whose run folder is `folder/run`: two small layers, rows of 32, 4 rows a step."""
    values = {
        "run": str(folder / "run"),
        "steps": 20,
        "rows_per_step": 4,
        "micro_rows": 2,
        "seed": 1,
        "model": {"preset": "debug", "backbone": "hybrid", "pattern": "AM", "d_model": 32, "d_ff": 32, "n_heads": 2}
        | {"n_kv_heads": 2},
        "data": {"sources": [[str(corpus() / "train"), 1.0]], "row_length": 32},
        "optim": {"lr": 0.003, "warmup_steps": 4},
        "checkpoint": {"every": 10},
        "log": {"every": 1, "tensorboard": False, "peak_tflops": 1.0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def recipe(folder: Path, *overrides: str, **changes: object) -> TrainConfig:
    return load_recipe(str(recipe_file(folder, **changes)), overrides)


def records(run: Path, kind: str = "train") -> list[dict]:
    """Records of a run's metrics file, in order."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def curve(run: Path) -> list[tuple]:
    """What must not change by a bit: step, loss, gradient norm, rate, and the hash of rows and noise."""
    return [(r["step"], r["loss"], r["gradient_norm"], r["lr"], r["rows_hash"]) for r in records(run)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mezzotint.launch.train", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """No compiled extension is at hand and none can be built: an empty cache, and no compiler or ninja on the path."""
    extensions = folder / "extensions"
    extensions.mkdir(exist_ok=True)
    scripts = str(Path(sys.executable).parent)
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    path = os.pathsep.join([scripts, "/usr/bin", "/bin"])
    return kept | {"TORCH_EXTENSIONS_DIR": str(extensions), "OMP_NUM_THREADS": "1", "CXX": "/bin/false", "PATH": path}


def run_command(folder: Path, arguments: list[str], *, timeout: float = 300) -> subprocess.CompletedProcess:
    return subprocess.run(
        arguments, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout
    )
