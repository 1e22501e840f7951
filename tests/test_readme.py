"""The commands of README's tour run as they stand, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    }


@pytest.mark.slow
def test_the_tour_runs(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    for line in tour():
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, line


def test_every_make_target_in_the_readme_is_there():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"`?make ([a-z][a-z-]*)`", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named and named <= targets
