"""The demo in small: it ends with a report, skips what is done, and survives being killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = ("steps=4", "rows_per_step=4", "validation.rows=2", "checkpoint.every=2", "log.every=1", "model.d_model=64")


def demo(out: Path) -> subprocess.Popen:
    overrides = [part for value in SMALL for part in ("--set", value)]
    command = [sys.executable, "-m", "mezzotint.launch.demo", "--out", str(out), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def running(out: Path) -> list[str]:
    """Command lines of live processes that work in `out`, this test's own left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(out) in line and int(entry.parent.name) != os.getpid():
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_then_finished_then_skipped(tmp_path):
    out = tmp_path / "demo"
    first = demo(out)
    deadline = time.monotonic() + 300
    while not list(out.glob("runs/*/latest")) and time.monotonic() < deadline:
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(2)
    assert running(out) == [], "a killed demo leaves no process behind"

    second = demo(out)
    text, _ = second.communicate()
    assert second.returncode == 0, text
    report = json.loads((out / "report.json").read_text())
    assert set(report["arms"]) == {"attention", "mamba", "hybrid"}
    for arm in report["arms"].values():
        assert arm["tokens_seen"] == 4 * 4 * 256
        assert arm["reload_difference"] <= 1e-5
    mamba = report["arms"]["mamba"]["speed"]
    assert len({cell["state_bytes"] for cell in mamba.values()}) == 1, "constant from 1k to 256k, to the byte"

    before = {
        path: path.stat().st_mtime_ns for path in out.glob("r*/*/*") if path.is_file() and "logs" not in path.parts
    }
    third = demo(out)
    text, _ = third.communicate()
    assert third.returncode == 0, text
    after = {path: path.stat().st_mtime_ns for path in before if path.suffix in (".safetensors", ".jsonl")}
    assert after == {path: before[path] for path in after}, "weights and measurements of a finished demo are not redone"


def test_a_second_demo_in_the_same_folder_is_refused(tmp_path):
    import fcntl

    (tmp_path / "logs").mkdir()
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        late = demo(tmp_path)
        text, _ = late.communicate()
    assert late.returncode == 2
    assert text.startswith("error: another demo is at work")
