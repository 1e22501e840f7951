"""The commands of README's tour run as they stand, in order, in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_support import small_tokenizer

from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.weights import save_weights

ROOT = Path(__file__).resolve().parent.parent


def tour() -> list[str]:
    """Lines of the code block behind the heading "A tour"."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## A tour.*?```sh\n(.*?)```", text, re.S)
    assert block, "README has no code block under '## A tour'"
    lines = [line.split("#")[0].strip() for line in block[1].splitlines()]
    return [line for line in lines if line]


def test_the_tour_names_every_command():
    assert {line.split()[0] for line in tour()} == {
        "mezzotint-data",
        "mezzotint-train",
        "mezzotint-export",
        "mezzotint-eval",
        "mezzotint-launch",
    }


@pytest.mark.slow
def test_the_tour_runs(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for line in tour():
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, line


def test_the_python_example_decodes(tmp_path):
    tokenizer = load_tokenizer(small_tokenizer(tmp_path / "tokenizer"))
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    config = preset("debug", "hybrid", pattern="MA", vocab_size=tokenizer.vocab_size, **ids)
    save_weights(Denoiser(config, generator=torch.Generator().manual_seed(0)), tmp_path / "release")
    shutil.copy(tokenizer.files[0], tmp_path / "release")
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert example, "README has no Python example"
    done = subprocess.run([sys.executable, "-c", example[1]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_make_target_in_the_readme_is_there():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"`?make ([a-z][a-z-]*)`", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named and named <= targets
