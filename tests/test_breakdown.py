"""Loss by level and position against a direct loop, and times by part against a clock and a device that are made up."""

import gzip
import json
import math
from collections import defaultdict

import pytest
import torch

from mezzotint.training import stopwatch
from mezzotint.training.breakdown import Breakdown, means, named
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import BlockSums
from mezzotint.training.profile import profiling
from mezzotint.training.stopwatch import PARTS, Stopwatch

CPU = torch.device("cpu")


def draws(row_blocks: int, slots: int, steps: int):
    """(noise, sums) of some micro-batches: rows with few valid blocks among them, sums zero where a slot is invalid."""
    g = torch.Generator().manual_seed(5)
    source = NoiseSource(seed=2, rows_per_step=6, row_blocks=row_blocks, slots=slots, block_length=4)
    for step in range(steps):
        blocks = torch.randint(0, row_blocks + 1, (6,), generator=g)
        noise = source.draw(step=step, first_row=0, blocks=blocks)
        masked = torch.randint(0, 5, noise.valid.shape, generator=g) * noise.valid
        yield noise, BlockSums(torch.rand(noise.valid.shape, generator=g) * masked, masked)


def direct(details, row_blocks: int) -> dict[str, float]:
    """The same means, one frontier at a time."""
    nll, count = defaultdict(float), defaultdict(int)
    for noise, sums in details:
        for row in range(len(noise.frontiers)):
            for slot in range(noise.frontiers.shape[1]):
                place = int(noise.frontiers[row, slot]) / row_blocks
                keys = (
                    f"nll_level_{math.floor(float(noise.levels[row, slot]) * 10) / 10:.1f}",
                    f"nll_position_{math.floor(place * 8) / 8:.3f}",
                )
                for key in keys:
                    nll[key] += float(sums.nll[row, slot])
                    count[key] += int(sums.masked[row, slot])
    return {key: nll[key] / count[key] for key in count if count[key]}


@pytest.mark.parametrize(("row_blocks", "slots"), [(32, 32), (32, 1), (8, 3), (4, 4), (1, 1)])
def test_means_by_level_and_position_equal_a_direct_loop(row_blocks, slots):
    details = list(draws(row_blocks, slots, steps=5))
    first, second = Breakdown(row_blocks, CPU), Breakdown(row_blocks, CPU)  # two ranks
    for place, detail in enumerate(details):
        (first if place % 2 else second).add([detail])
    found = named(*means(first.take() + second.take()), row_blocks=row_blocks)
    expected = direct(details, row_blocks)
    assert {key for key in found if math.isfinite(found[key])} == expected.keys()
    assert expected == pytest.approx({key: found[key] for key in expected}, rel=1e-6)
    assert sum(key.startswith("nll_level_") for key in found) == 10
    assert sum(key.startswith("nll_position_") for key in found) == min(row_blocks, 8)


def test_sums_start_again_after_they_were_taken():
    breakdown = Breakdown(8, CPU)
    (first, second) = draws(8, 8, steps=2)
    breakdown.add([first])
    breakdown.take()
    breakdown.add([second])
    again = Breakdown(8, CPU)
    again.add([second])
    assert torch.equal(breakdown.take(), again.take())
    assert not breakdown.take().any()
    assert all(math.isnan(value) for half in means(breakdown.take()) for value in half)


def test_seconds_by_part_follow_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    watch = Stopwatch(CPU)
    for seconds in (1.0, 2.0):
        with watch.split("data"):
            now[0] += seconds
        now[0] += 50
    with watch.split("validate"), watch.split("forward"):  # nested: counts for both
        now[0] += 4
    with pytest.raises(KeyError), watch.split("step"):
        now[0] += 8
        raise KeyError
    assert watch.take() == dict.fromkeys(PARTS, 0.0) | {"data": 3.0, "forward": 4.0, "validate": 4.0, "step": 8.0}
    assert not any(watch.take().values())
    with pytest.raises(ValueError, match="'fetch' is no part"), watch.split("fetch"):
        pass


class Queue:
    """A device: marks are passed in order, at a time of its own, only as far as it has come."""

    def __init__(self) -> None:
        self.marks, self.passed, self.made, self.waits = [], 0, 0, 0

    def event(self, enable_timing: bool):
        assert enable_timing
        self.made += 1
        queue = self

        class Event:
            def record(self) -> None:
                self.place = len(queue.marks)
                queue.marks.append(self)

            def query(self) -> bool:
                return self.place < queue.passed

            def elapsed_time(self, end) -> float:
                assert self.query() and end.query()
                return 1000.0 * (end.place - self.place)  # a second between neighbours

        return Event()

    def synchronize(self) -> None:
        self.waits, self.passed = self.waits + 1, len(self.marks)


def test_on_a_device_nothing_waits_until_the_seconds_are_asked_for(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch.cuda, "synchronize", queue.synchronize)
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(100):
        with watch.split("forward"):
            pass
        with watch.split("backward"), watch.split("step"):
            pass
        queue.passed = max(0, len(queue.marks) - 5)  # the device is some marks behind
    assert queue.waits == 0
    assert queue.made < 20, "events are not used again"
    assert watch.take() == dict.fromkeys(PARTS, 0.0) | {"forward": 100.0, "backward": 300.0, "step": 100.0}
    assert queue.waits == 1
    assert not any(watch.take().values())


def test_a_profile_holds_three_steps_after_two_and_names_their_parts(tmp_path, capsys):
    watch = Stopwatch(CPU)
    with profiling(tmp_path, True, rank=3) as steps:
        for _ in range(8):
            with watch.split("forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            steps.step()
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank-3.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"] if event.get("cat") != "Trace"]
    assert sorted(name for name in set(names) if name.startswith("ProfilerStep")) == [
        f"ProfilerStep#{i}" for i in (2, 3, 4)
    ]
    assert names.count("forward") == 3 and names.count("aten::mm") == 3
    assert "aten::mm" in (tmp_path / "profile" / "rank-3.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["rank-3.json.gz", "rank-3.txt"]
    with profiling(tmp_path / "none", False, rank=0) as steps:
        steps.step()
    assert not (tmp_path / "none").exists()
    with profiling(tmp_path / "short", True, rank=0) as steps:
        steps.step()
    assert "no profile: the run ended before" in capsys.readouterr().out
