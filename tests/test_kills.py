"""A `prepare` that is killed at any moment, or finds the disk full, goes on and ends with the same bytes."""

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from data_support import PROSE, small_tokenizer

from mezzotint.data.__main__ import main

SCRIPT = Path(__file__).with_name("kill_prepare.py")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(small_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"{PROSE * (n % 3)}number {n}"}) + "\n" for n in range(25)))
    return str(path)


def contents(folder: Path):
    """Hash of every file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed_at(text, tokenizer, folder, *renames) -> int:
    """Runs killed at these renames (none: at each), compared with one that was left alone; its number of renames."""
    command = [sys.executable, str(SCRIPT), text, tokenizer, str(folder), *map(str, renames)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    straight = contents(folder / "straight")
    killed = [path for path in folder.iterdir() if path.name.startswith("killed")]
    assert len(straight) > 15 and killed
    for path in killed:
        assert contents(path) == straight, path.name
    return int(done.stdout)


def test_kills_at_the_first_renames_of_shards_and_of_records(tmp_path, text, tokenizer):
    """Rename 0 is the record of settings, 1 and 2 tokenizers; then .bin and .idx of two splits and the part's record."""
    assert killed_at(text, tokenizer, tmp_path, 0, 4, 7) > 15


@pytest.mark.slow
def test_kills_at_every_rename(tmp_path, text, tokenizer):
    total = killed_at(text, tokenizer, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1 + 2 * total


@pytest.mark.slow
def test_kills_at_random_moments_of_the_command_and_its_workers(tmp_path, tokenizer):
    """SIGKILL again and again at random moments, two workers: each run goes on, and no worker outlives its parent."""

    def command(out):
        options = ["--corpus", "stdlib", "--heldout", "0.03", "--shard-mb", "1", "--workers", "2"]
        return [
            sys.executable,
            "-m",
            "mezzotint.data",
            "prepare",
            *options,
            "--tokenizer",
            tokenizer,
            "--out",
            str(out),
        ]

    def start(out):
        return subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    began = time.monotonic()
    assert start(tmp_path / "straight").wait() == 0
    whole = time.monotonic() - began
    chance, out, kills, parts = random.Random(3), tmp_path / "killed", 0, []
    while True:
        running = start(out)
        deadline = time.monotonic() + chance.uniform(0.1, 0.9) * whole
        while running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if running.poll() is not None:
            assert running.returncode == 0
            break
        family = psutil.Process(running.pid).children(recursive=True)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
        kills += 1
        parts.append(len(list((out / "progress").glob("*.json"))))
        assert parts == sorted(parts)  # what was whole stays
        assert kills < 60
    assert kills >= 3
    assert contents(out) == contents(tmp_path / "straight")


@pytest.mark.parametrize("limit", [3000, 900])
def test_full_disk_is_one_sentence_and_the_work_goes_on_later(tmp_path, text, tokenizer, capsys, limit):
    """Files may not grow beyond `limit` bytes: a disk that fills up in the middle of a shard."""
    options = ["--tokenizer", tokenizer, "--heldout", "0.3", "--shard-mb", "0.01", "--workers", "1"]

    def run(out):
        return main(["prepare", "--input", text, *options, "--out", str(tmp_path / out)])

    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, allowed[1]))
    try:
        code = run("full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1, said
    assert "cannot be written (File too large)" in said and "free some space" in said
    assert not list(tmp_path.rglob("*.partial"))
    assert run("full") == run("straight") == 0
    assert contents(tmp_path / "full") == contents(tmp_path / "straight")


@pytest.mark.parametrize(
    "synced", [12, 13, 14, 15, 16, 17]
)  # a part's record; .bin and .idx of both splits; its record
def test_disk_that_fills_up_later_keeps_what_is_whole(tmp_path, text, tokenizer, capsys, monkeypatch, synced):
    options = ["--tokenizer", tokenizer, "--heldout", "0.3", "--shard-mb", "0.002", "--workers", "1"]

    def run(out):
        return main(["prepare", "--input", text, *options, "--out", str(tmp_path / out)])

    calls, fsync = [], os.fsync

    def full_later(fd):
        calls.append(fd)
        if len(calls) > synced:
            raise OSError(28, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_later)
        assert run("full") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be written (No space left on device)" in said
    assert not list(tmp_path.rglob("*.partial"))
    assert list((tmp_path / "full" / "progress").iterdir())
    assert run("full") == run("straight") == 0
    assert contents(tmp_path / "full") == contents(tmp_path / "straight")
