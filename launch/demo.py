"""`make demo`: corpus, matched arms, releases, bound, samples, speed sweep and report, each step by its own command.

Every step is a command a user can type, and every command goes on where it stopped; so does the demo.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError
from mezzotint.data.files import write_bytes

ARMS = ("mamba", "hybrid", "attention")  # the slowest first
VOCABULARY = 2048
HELDOUT = 0.03
BOUND_ROWS, BOUND_DRAWS, ROW_LENGTH = 64, 4, 256
CONTEXTS = "1k,4k,16k,64k,256k"
PROMPT = 'class Parser:\n    """Parse the arguments of a command."""\n\n    def __init__(self, name):\n'
STATUS_SECONDS = 15.0


@dataclass(frozen=True)
class Place:
    """Where the demo keeps what it makes."""

    root: Path

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def results(self) -> Path:
        return self.root / "results"

    def run(self, arm: str) -> Path:
        return self.root / "runs" / arm

    def release(self, arm: str) -> Path:
        return self.root / "releases" / arm

    def log(self, name: str) -> Path:
        return self.root / "logs" / f"{name}.log"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(prog="make demo", description="The whole of mezzotint on one small machine.")
    parser.add_argument("--out", default="runs/demo", help="folder for everything it makes (default runs/demo)")
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value", help="change the demo recipe")
    given = parser.parse_args(arguments)
    return run_command(lambda: demo(Place(Path(given.out)), given.set))


def demo(place: Place, overrides: Sequence[str] = ()) -> int:
    """Run all steps under `place`; `overrides` change the recipe of all arms alike."""
    began = time.monotonic()
    for folder in (place.results, place.root / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    with only_one(place.root):
        steps(place, overrides)

        from mezzotint.launch.demo_report import write_report

        print(write_report(place.root, arms=sorted(ARMS), row_length=ROW_LENGTH, seconds=time.monotonic() - began))
    print(f"written: {place.root / 'report.md'}, report.json and the plots in {place.results}")
    return 0


def steps(place: Place, overrides: Sequence[str]) -> None:
    prepare(place)
    train_arms(place, overrides)
    require_matched(place)
    say("measuring denoising, commit and prefill from 1k to 256k tokens of context")
    releases = [str(place.release(arm)) for arm in sorted(ARMS)]
    command = ["mezzotint.eval", "speed", *releases, "--contexts", CONTEXTS, "--quick", "--check-fill", "--in-process"]
    step([*command, "--out", str(place.results / "speed.jsonl")], place.log("speed"), show=True)


def prepare(place: Place) -> None:
    """Tokenizer and shards of the standard library of this interpreter, a held-out part apart."""
    share = ["--corpus", "stdlib", "--heldout", str(HELDOUT)]
    if not (place.tokenizer / "tokenizer.model").exists():
        say("training a tokenizer on the standard library of this Python")
        size = ["--vocab-size", str(VOCABULARY), "--out", str(place.tokenizer)]
        step(["mezzotint.data", "train-tokenizer", *share, *size], place.log("tokenizer"))
    say("tokenizing the standard library")
    where = ["--tokenizer", str(place.tokenizer), "--out", str(place.data)]
    step(["mezzotint.data", "prepare", *share, *where], place.log("prepare"))


def train_arms(place: Place, overrides: Sequence[str]) -> None:
    """Train, export, bound and sample each arm, side by side, one core each (threads that share cores spin)."""
    workers = max(1, min(len(ARMS), os.cpu_count() or 1))
    say(f"training {', '.join(ARMS)} as matched arms, {workers} at a time; logs in {place.root / 'logs'}")
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(place, done), daemon=True)
    watcher.start()
    pool = ThreadPoolExecutor(workers)
    try:
        arms = [pool.submit(one_arm, place, arm, overrides) for arm in ARMS]
        for arm in as_completed(arms):
            arm.result()
    except BaseException:
        stop_children()
        raise
    finally:
        done.set()
        pool.shutdown(wait=True, cancel_futures=True)
        watcher.join()


def one_arm(place: Place, arm: str, overrides: Sequence[str]) -> None:
    log, run, release = place.log(arm), place.run(arm), place.release(arm)
    data = [f"data.sources=[[{place.data / 'train'},1.0]]", f"validation.folder={place.data / 'heldout'}"]
    step(["mezzotint.launch.train", "demo", f"model.backbone={arm}", f"run={run}", *data, *overrides], log)
    exported = place.results / f"{arm}-export.txt"
    if not fresh(exported, run / "latest"):
        for stale in [*place.results.glob(f"{arm}-*"), *place.results.glob("speed*")]:
            stale.unlink(missing_ok=True)
        said = step(["mezzotint.launch.export", str(run), str(release), "--overwrite"], log, capture=True)
        write_bytes(exported, said.encode())
    scored = ["--rows", str(BOUND_ROWS), "--draws", str(BOUND_DRAWS), "--row-length", str(ROW_LENGTH)]
    out = ["--out", str(place.results / f"{arm}-bound.jsonl")]
    step(["mezzotint.eval", "bound", str(release), "--data", str(place.data / "heldout"), *scored, *out], log)
    sample = place.results / f"{arm}-sample.json"
    if not sample.exists():
        asked = ["--prompt", PROMPT, "--max-new-tokens", "128", "--temperature", "0.8", "--json"]
        text = step(["mezzotint.eval", "generate", str(release), *asked], log, capture=True)
        write_bytes(sample, text.encode())
    with open(log, "a", encoding="utf-8") as written:
        written.write("done: trained, exported, scored and sampled\n")


def fresh(made: Path, source: Path) -> bool:
    """Is `made` there and no older than what it is made of?"""
    return made.exists() and made.stat().st_mtime >= source.stat().st_mtime


def step(module_and_arguments: Sequence[str], log: Path, *, show: bool = False, capture: bool = False) -> str:
    """Run `python -m ...` on one thread, its output in `log`; an InputError with its last line if it fails."""
    command = [sys.executable, "-m", *module_and_arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "a", encoding="utf-8") as written:
        written.write("$ python " + shlex.join(command[1:]).replace("\n", "\\n") + "\n")
        written.flush()
        output = subprocess.PIPE if capture else None if show else written
        errors = None if show else written
        child = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, text=True, preexec_fn=die_with_parent
        )
        CHILDREN.add(child)
        out, _ = child.communicate()
        CHILDREN.discard(child)
    if child.returncode:
        why = "see above" if show else f"{last_line(log)} (see {log})"
        raise InputError(f"{' '.join(module_and_arguments[:2])} ended with code {child.returncode}: {why}")
    return out or ""


CHILDREN: set[subprocess.Popen] = set()  # running steps, so that one failure or Ctrl-C ends the others


def stop_children() -> None:
    for child in list(CHILDREN):
        child.terminate()


def die_with_parent() -> None:
    """A killed demo must not leave a trainer behind that writes into the next one's folder (Linux; nothing elsewhere)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Hold the demo's folder; InputError where another demo holds it. The lock ends with the process."""
    with open(root / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"another demo is at work in {root}: wait for it, or give another folder by --out"
            ) from error
        yield


def last_line(log: Path) -> str:
    lines = [line for line in re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace")) if line.strip()]
    return lines[-1].strip() if lines else ""


def watch(place: Place, done: threading.Event) -> None:
    """Say every few seconds where each arm is."""
    began = time.monotonic()
    while not done.wait(STATUS_SECONDS):
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        for arm in ARMS:
            if place.log(arm).exists():
                print(f"  {minutes:02}:{seconds:02} {arm:9} {last_line(place.log(arm))[:110]}", flush=True)


def require_matched(place: Place) -> None:
    """The arms must have one and the same hash of rows, noise, seeds, steps and precision."""
    from mezzotint.training.build import make_plan
    from mezzotint.training.config import load_recipe

    hashes = {arm: make_plan(load_recipe(str(place.run(arm) / "config.yaml"))).arms_hash for arm in ARMS}
    distinct = set(hashes.values())
    if len(distinct) != 1:
        raise InputError(f"the arms do not match, their hashes are {hashes}: remove {place.root} and start again")
    say(f"matched arms: rows, noise, seeds, steps and precision have hash {distinct.pop()} in all three")


def say(text: str) -> None:
    width = shutil.get_terminal_size().columns
    print(f"-- {text} ".ljust(min(width, 100), "-"), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
