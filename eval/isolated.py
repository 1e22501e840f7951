"""Runs a function in a process of its own: fresh memory, limits of time and memory, and a crash that ends nothing else.

The child is `python -m mezzotint.eval.isolated`: it reads {function, arguments, memory_limit, parent} as JSON from standard
input and answers with one line of JSON; what else it prints goes to standard error, which is shown only when it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# how interpreters, allocators, loaders and torch say that memory ran out
MEMORY_WORDS = (
    *("MemoryError", "bad_alloc", "out of memory", "not enough memory", "allocate memory", "memory allocation"),
    *("failed to map segment", "cannot allocate", "Resource temporarily unavailable"),
)
SHOWN = 300  # characters of a message that a row keeps
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """A status of results.STATUSES and what the function found, or the message of its failure."""

    status: str
    values: dict


def run_isolated(
    function: str, arguments: Mapping[str, object], *, timeout: float | None = None, memory_limit: int | None = None
) -> Outcome:
    """Call `function` ("package.module:name") in a new process; it returns (status, values), both as JSON can say them.

    timeout: seconds, after which the process is killed and the status is "timeout". memory_limit: bytes of address space
    (RLIMIT_AS). Memory that runs out, by that limit or by the kernel's killer, is "oom"; any other end is "error" with the
    last line of standard error.
    """
    request = {"function": function, "arguments": dict(arguments), "memory_limit": memory_limit, "parent": os.getpid()}
    killed_before = _oom_kills()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "mezzotint.eval.isolated"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the child
        )
        try:
            answer, _ = child.communicate(json.dumps(request).encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", {"message": f"not done after {timeout:g} s", "timeout_s": timeout})
        finally:
            _end(child)
        if child.returncode == 0 and answer:
            found = json.loads(answer)
            return Outcome(found["status"], found["values"])
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    return _failure(child.returncode, said, killed_for_memory=_oom_kills() > killed_before)


def _end(child: subprocess.Popen) -> None:
    """The child and whatever it started are gone after this."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _failure(code: int, said: str, *, killed_for_memory: bool) -> Outcome:
    last = said.splitlines()[-1][:SHOWN] if said else "it said nothing"
    if code < 0:
        last = f"ended by {signal.Signals(-code).name}: {last}"
    out_of_memory = says_out_of_memory(said.splitlines()[-3:]) or (code == -signal.SIGKILL and killed_for_memory)
    return Outcome("oom" if out_of_memory else "error", {"message": last, "exit_code": code})


def says_out_of_memory(lines: list[str]) -> bool:
    text = "\n".join(lines)
    return any(words in text for words in MEMORY_WORDS)


def _oom_kills() -> int:
    """Processes that the kernel has killed for memory since it started, 0 where it does not count them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def main() -> int:
    """The child."""
    request = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, now or in a library, must not stand in the answer
    _follow(request["parent"])
    limit = request["memory_limit"]
    if limit is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    module, name = request["function"].split(":")
    try:
        status, values = vars(importlib.import_module(module))[name](**request["arguments"])
    except (MemoryError, RuntimeError, ImportError, OSError) as error:
        message = f"{type(error).__name__}: {error}"
        if not says_out_of_memory([message]):
            raise
        status, values = "oom", {"message": message.splitlines()[0][:SHOWN]}
    answer.write(json.dumps({"status": status, "values": values}, allow_nan=False))
    answer.flush()
    return 0


def _follow(parent: int) -> None:
    """Die when the parent dies, by kill -9 too, and be the first that the kernel kills when memory runs out."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:  # it died before that
        os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of torch's own ending can undo an answer that was given
