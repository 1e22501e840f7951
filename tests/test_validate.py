"""The bound on one rank and on several, against a direct loop; asked to stop on one rank, all leave at the same turn."""

import math
import threading
from collections import defaultdict

import pytest
import torch
from support import generator, tiny_config, tiny_model

from mezzotint.models.schedule import Schedule
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import Objective
from mezzotint.training.validate import HeldOut, ValidationConfig, bound

G, BLOCKS, ROWS = 4, 16, 7
CONFIG = ValidationConfig(folder="held-out", rows=ROWS, draws=2, seed=5)


class ThreadRanks:
    """One of several ranks that are threads: sums wait for all of them."""

    def __init__(self, rank: int, world: int, meet: threading.Barrier, shared: list) -> None:
        self.rank, self.world, self.device = rank, world, torch.device("cpu")
        self._meet, self._shared = meet, shared

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._shared[self.rank] = values.double()
        self._meet.wait(30)
        total = sum(self._shared)
        self._meet.wait(30)
        return total


def on_ranks(world: int, work) -> list:
    """`work(ranks)` of every rank, at the same time."""
    meet, shared, results = threading.Barrier(world), [None] * world, [None] * world

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, world, meet, shared))
        except BaseException:
            meet.abort()
            raise

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(scope="module")
def judged():
    """An objective of another schedule than the bound's, and rows of which one is short."""
    config = tiny_config("AM", G)
    tokens = torch.randint(3, config.vocab_size, (ROWS, G * BLOCKS), generator=generator())
    documents, blocks = torch.zeros_like(tokens), torch.full((ROWS,), BLOCKS)
    documents[2, 3 * G :], blocks[2] = -1, 3
    held_out = HeldOut(tokens, documents, blocks, torch.full((ROWS,), 50.0, dtype=torch.float64))
    return Objective(tiny_model(config), Schedule(name="cosine")), held_out


def take(judged, world: int = 1, stopped=lambda rank: False, micro_rows: int = 2):
    objective, held_out = judged

    def work(ranks):
        ask = {"config": CONFIG, "micro_rows": micro_rows, "ranks": ranks, "stopped": lambda: stopped(ranks.rank)}
        return bound(objective, held_out, **ask)

    return on_ranks(world, work)


def test_the_bound_is_a_direct_loop_by_level_and_by_position(judged):
    objective, held_out = judged
    judge = Objective(objective.model, Schedule())
    source = NoiseSource(seed=5, rows_per_step=ROWS, row_blocks=BLOCKS, slots=BLOCKS, block_length=G)
    total, nll, count = 0.0, defaultdict(float), defaultdict(int)
    for draw in range(2):
        for row in range(ROWS):
            noise = source.draw(step=draw, first_row=row, blocks=held_out.blocks[row : row + 1])
            with torch.no_grad():
                loss, sums = judge(held_out.tokens[row : row + 1], held_out.documents[row : row + 1], noise)
            total += float(loss) / 2
            for slot in range(int(held_out.blocks[row])):
                for key in (("level", int(float(noise.levels[0, slot]) * 10)), ("position", slot * 8 // BLOCKS)):
                    nll[key] += float(sums.nll[0, slot])
                    count[key] += int(sums.masked[0, slot])
    (found,) = take(judged)
    assert found.nats_per_token == pytest.approx(total / (((ROWS - 1) * BLOCKS + 3) * G), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / (ROWS * 50), rel=1e-12)
    for name, values in (("level", found.nll_by_level), ("position", found.nll_by_position)):
        expected = [nll[name, i] / count[name, i] for i in range(len(values))]
        assert list(values) == pytest.approx(expected, rel=1e-12)
    record = found.record()
    assert record["nll_position_0.875"] == found.nll_by_position[7] and record["nll_level_0.9"] == found.nll_by_level[9]
    assert len(record) == 4 + 10 + 8


@pytest.mark.parametrize(("world", "micro_rows"), [(2, 2), (3, 2), (3, 7)])
def test_ranks_together_find_what_one_finds(judged, world, micro_rows):
    """Eight micro-batches on two ranks and on three, two on three: some ranks have none in the last turn."""
    (alone,) = take(judged)
    for found in take(judged, world, micro_rows=micro_rows):
        assert found.record() == pytest.approx(alone.record(), rel=1e-12)


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_who_is_asked_to_stop_takes_all_ranks_along(judged, turn):
    asked = [0, 0]

    def stopped(rank: int) -> bool:
        asked[rank] += 1
        return rank == 1 and asked[rank] == turn + 1

    assert take(judged, 2, stopped) == [None, None]
    assert asked == [turn + 1] * 2
