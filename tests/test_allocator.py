"""Memory that a process keeps after freeing it."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from mezzotint.models.allocator import keep_freed_memory
asked = keep_freed_memory() if sys.argv[1] == "kept" else True
def work():
    for _ in range(20):
        torch.ones(16, 2**20)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(asked, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(way: str) -> int:
    """Pages that were made anew by twenty tensors of 64 MiB, one after the other."""
    done = subprocess.run([sys.executable, "-c", CODE, way], capture_output=True, check=True, text=True)
    asked, count = done.stdout.split()
    if asked == "False":
        pytest.skip("this C library has no mallopt")
    return int(count)


def test_freed_memory_is_found_again():
    assert faults("kept") < 1000 < faults("given back")
