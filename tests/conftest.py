"""What every test runs under: this checkout's code, one thread, a restored default dtype, and poisoned memory."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

# before anything imports numpy or torch: test runs share small machines, and sums must not depend on the core count
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal

import pytest
import torch

import mezzotint.models

# where there is no GPU, Triton's kernels run in its interpreter, which it decides when it is first imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

CHECKOUT = Path(__file__).resolve().parents[1]
# Files of a few tests that take minutes each, longest first: begun last, they would leave the other worker idle
LONGEST = (
    *("test_launch.py", "test_training_kills.py", "test_slurm.py", "test_policies_shared.py", "test_demo.py"),
    *("test_speed_isolated.py", "test_long_context.py", "test_readme.py"),
)
ENVIRONMENT = sorted(set(os.environ) - {"PYTEST_CURRENT_TEST"})


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another checkout: an editable install follows the folder it was made in."""
    installed = Path(mezzotint.models.__file__).resolve().parents[1]
    if installed != CHECKOUT:
        raise pytest.UsageError(
            f"mezzotint is installed from {installed}, not from {CHECKOUT}; run `pip install -e .` in {CHECKOUT} first"
        )
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background: the tests' children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which workers take files (with --no-loadscope-reorder): the longest, then those of most tests."""
    tests = Counter(item.path.name for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), -tests[name]

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _default_dtype_restored():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def _process_state() -> dict[str, object]:
    """What a test may change for those after it in the same process; test files meet in any order."""
    return {
        "torch.nn.functional": dict(vars(torch.nn.functional)),  # DeepSpeed's stage 3 replaces `linear`
        "os.environ": {name: os.environ.get(name) for name in ENVIRONMENT},  # libraries add their own when imported
        "folder": os.getcwd(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _process_left_as_found():
    before = _process_state()
    yield
    after = _process_state()
    vars(torch.nn.functional).update(before["torch.nn.functional"])  # type: ignore[call-overload]
    assert [name for name in before if before[name] != after[name]] == []


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """torch.empty and its relatives come filled with NaN (integers: their maximum), so that unwritten memory shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
