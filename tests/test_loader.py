"""One order of rows for all: the same after a resume, for any ranks and micro-batches; exact in epochs and mixing."""

import threading
from collections import Counter

import pytest
import torch
from data_support import write_prepared

from mezzotint.data.errors import InputError
from mezzotint.data.loader import Batch, DataConfig, Loader

FIELDS = ("tokens", "documents", "fill", "blocks", "row_ids")


def folder_of(path, rows, first=4):
    """A prepared folder of `rows` rows of 8 tokens, each row its own document."""
    return str(write_prepared(path, [[[first + n % 90] * 7 + [1] for n in range(rows)]]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared")
    return folder_of(root / "a", 37), folder_of(root / "b", 11, first=50)


def loader(*sources, **options):
    return Loader(DataConfig(sources=sources, row_length=8, **options), block_length=4)


def assert_same(one: Batch, two: Batch):
    for name in FIELDS:
        assert torch.equal(vars(one)[name], vars(two)[name]), name


def join(batches):
    return Batch(**{name: torch.cat([vars(batch)[name] for batch in batches]) for name in FIELDS})


def take(iterator, count):
    taken = [next(iterator) for _ in range(count)]
    iterator.close()
    return taken


def test_each_epoch_holds_each_row_once_in_another_order(folders):
    data = loader((folders[0], 1.0))
    epochs = [data.batch(37 * epoch, 37).row_ids.tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(37))


def test_batch_holds_the_rows_its_ids_name(folders):
    data = loader((folders[0], 1.0), (folders[1], 1.0))
    batch = data.batch(5, 20)
    for n, row_id in enumerate(batch.row_ids.tolist()):
        source, row = (data.sources[0], row_id) if row_id < 37 else (data.sources[1], row_id - 37)
        assert batch.tokens[n].tolist() == source[row].tokens.tolist()
    assert batch.tokens.dtype == batch.documents.dtype == batch.blocks.dtype == batch.row_ids.dtype == torch.int64
    assert batch.fill.dtype == torch.bool and batch.blocks.tolist() == [2] * 20


def test_order_does_not_depend_on_ranks_or_micro_batches(folders):
    data = loader((folders[0], 2.0), (folders[1], 1.0))
    whole = take(data.iterate(0, 12), 9)
    for ranks in (2, 3, 4):
        share = 12 // ranks
        shares = [take(data.iterate(0, 12, rank * share, share), 9) for rank in range(ranks)]
        for step in range(9):
            assert_same(whole[step], join([steps[step] for steps in shares]))
    assert_same(join(whole), join([data.batch(p, 1) for p in range(12 * 9)]))


def test_resume_is_one_integer(folders):
    sources = (folders[0], 2.0), (folders[1], 1.0)
    uninterrupted = take(loader(*sources).iterate(0, 6), 30)
    for step in (1, 7, 29):
        assert_same(next(loader(*sources).iterate(step, 6)), uninterrupted[step])


def test_far_positions_cost_nothing(folders):
    data = loader((folders[0], 1.0))
    assert sorted(data.batch(37 * 10**9, 37).row_ids.tolist()) == list(range(37))


def test_mixing_follows_the_weights_exactly(folders):
    data = loader((folders[0], 3.0), (folders[1], 1.0))
    ids = torch.tensor(data.row_ids(0, 4000))
    assert int((ids >= 37).sum()) == 1000
    for start in range(0, 4000, 100):  # not only in the long run
        assert abs(int((ids[start : start + 100] >= 37).sum()) - 25) <= 1
    counts = Counter(ids[ids >= 37].tolist())
    assert max(counts.values()) - min(counts.values()) <= 1  # each source goes through its own epochs


def test_sources_of_one_size_have_orders_of_their_own(tmp_path):
    data = loader((folder_of(tmp_path / "a", 30), 1.0), (folder_of(tmp_path / "b", 30), 1.0))
    ids = data.batch(0, 60).row_ids
    assert ids[ids < 30].tolist() != (ids[ids >= 30] - 30).tolist()


def test_seed_and_data_decide_order_and_hash(folders):
    base = loader((folders[0], 1.0))
    again = loader((folders[0], 1.0))
    assert base.hash == again.hash and base.row_ids(0, 50) == again.row_ids(0, 50)
    others = [
        loader((folders[0], 1.0), seed=1),
        loader((folders[1], 1.0)),
        loader((folders[0], 1.0), (folders[1], 1.0)),
        loader((folders[0], 1.0), (folders[1], 2.0)),
        loader((folders[0], 1.0), align=False),
        Loader(DataConfig(sources=((folders[0], 1.0),), row_length=8), block_length=8),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == len(others) + 1
    assert base.row_ids(0, 50) != others[0].row_ids(0, 50)


def test_prefetch_ends_its_thread_and_carries_errors(folders):
    data = loader((folders[0], 1.0))
    steps = data.iterate(0, 4)
    next(steps)
    assert any(thread.name == "mezzotint-prefetch" for thread in threading.enumerate())
    steps.close()
    assert not any(thread.name == "mezzotint-prefetch" for thread in threading.enumerate())
    with pytest.raises(IndexError):
        next(data.iterate(-100, 4))


@pytest.mark.parametrize(("offset", "count"), [(-1, 2), (0, 0), (3, 2), (0, 5)])
def test_shares_outside_the_step(folders, offset, count):
    with pytest.raises(InputError, match="do not lie in a step of 4 rows"):
        loader((folders[0], 1.0)).iterate(0, 4, offset, count)


def test_refusals(folders, tmp_path):
    with pytest.raises(InputError, match="sources is empty"):
        loader()
    with pytest.raises(InputError, match="weight"):
        loader((folders[0], 0.0))
    with pytest.raises(InputError, match="weight"):
        loader((folders[0], float("nan")))
    with pytest.raises(InputError, match="seed"):
        loader((folders[0], 1.0), seed=-1)
    with pytest.raises(InputError, match="no prepared folder"):
        loader((str(tmp_path), 1.0))
    other = str(write_prepared(tmp_path / "other", [[[4, 5, 6, 1] * 4]], tokenizer="other"))
    with pytest.raises(InputError, match="different tokenizers"):
        loader((folders[0], 1.0), (other, 1.0))
