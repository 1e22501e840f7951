"""Runs `prepare` in forked processes that are killed at their n-th rename, before or after it; a script for test_kills.

usage: kill_prepare.py INPUT TOKENIZER FOLDER N...    prints the number of renames of a run that is left alone first
"""

import os
import signal
import sys
from pathlib import Path

import datasets  # noqa: F401  (imported once, before all forks)

from mezzotint.data.prepare import PrepareConfig, prepare
from mezzotint.data.sources import SourceConfig


def config(out: Path) -> PrepareConfig:
    source = SourceConfig(input=sys.argv[1])
    return PrepareConfig(tokenizer=sys.argv[2], out=str(out), source=source, heldout=0.3, shard_mb=0.002, workers=1)


def forked(work) -> int:
    """Run `work` in a child; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] & 0x7F


def killed_at(number: int, *, after: bool, out: Path):
    """A run that kills itself at its rename `number`, counted over its whole life."""
    rename, done = os.replace, []

    def replace(*names):
        if after:
            rename(*names)
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(names)
        if not after:
            rename(*names)

    os.replace = replace
    prepare(config(out))


def count(out: Path) -> int:
    """Renames of a whole run."""
    rename, done = os.replace, []
    os.replace = lambda *names: (done.append(names), rename(*names))
    prepare(config(out))
    os.replace = rename
    return len(done)


def main() -> None:
    folder = Path(sys.argv[3])
    total = count(folder / "straight")
    print(total, flush=True)
    wanted = [int(n) for n in sys.argv[4:]] or list(range(total))
    for number in wanted:
        for after in (False, True):
            out = folder / f"killed-{number}-{'after' if after else 'before'}"
            ended = forked(lambda n=number, a=after, o=out: killed_at(n, after=a, out=o))
            assert ended == signal.SIGKILL, (number, ended)
            # a second death on the way, then the end
            forked(lambda a=after, o=out: killed_at(2, after=not a, out=o))
            assert forked(lambda o=out: prepare(config(o))) == 0


if __name__ == "__main__":
    main()
