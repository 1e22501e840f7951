"""One order of rows for all: the same after a resume, for any ranks and micro-batches; exact in epochs and mixing."""

import json
import threading
from collections import Counter
from random import Random

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


def documents_of(first):
    """Two shards of 49 documents that differ by `first`."""
    long = [[4 + (first + 7 * n + 3 * k) % 90 for k in range(3 + n % 11)] + [1] for n in range(40)]
    return [long, [[5, 6, 1]] * 9]


@pytest.mark.parametrize(
    ("names", "align", "digest"),
    [
        ("a", True, "4457088140715a183f6a0a892234a7abb3fd2f9b948efe9867b93c1b848e34d1"),
        ("a", False, "be6e8c1b4e7315421cade9d2f8bf3cbca03ca6a1f788d7522322ae760db8a780"),
        ("ab", True, "9a02dfa95ae7a157b020ca3e36ef43805bc8a8b48ef90ce95ccc045efe385471"),
        ("ab", False, "85a317778b513dd296e62f5400df90cd176b6a05a5cbd29478b907af2e308d71"),
    ],
)
def test_hash_of_folders_of_format_1_stays(tmp_path, names, align, digest):
    """Hashes as the version that wrote format 1 gave them: runs on such folders resume."""
    sources = []
    for name, weight in zip(names, (0.7, 0.3) if len(names) == 2 else (1.0,)):
        path = write_prepared(tmp_path / name, documents_of(5 * "ab".index(name))) / "manifest.json"
        content = json.loads(path.read_text()) | {"format": 1}
        for shard in content["shards"]:
            del shard["bin_blocks"], shard["idx_blocks"]
        path.write_text(json.dumps(content))
        sources.append((str(path.parent), weight))
    config = DataConfig(sources=tuple(sources), row_length=16, seed=3, align=align)
    assert Loader(config, block_length=4 if align else 16).hash == digest


def test_sources_of_unequal_weight_resume_anywhere(tmp_path):
    """0.7 and 0.3 within sampling error of independent draws, in order, whole epochs of each, for any ranks and start."""
    sources = (folder_of(tmp_path / "a", 101), 0.7), (folder_of(tmp_path / "b", 67, first=50), 0.3)
    ids = loader(*sources).row_ids(0, 6000)
    assert abs(sum(i < 101 for i in ids) - 4200) < 2 * (6000 * 0.7 * 0.3) ** 0.5
    for first, rows in ((0, 101), (101, 67)):
        own = [i - first for i in ids if first <= i < first + rows]
        epochs = [own[start : start + rows] for start in range(0, len(own) - rows, rows)]
        assert len(epochs) > 20 and all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    random = Random(1)
    for _ in range(20):
        share, ranks, step = random.randint(1, 5), random.randint(1, 5), random.randint(0, 200)
        rows = share * ranks
        found = [next(loader(*sources).iterate(step, rows, rank * share, share)) for rank in range(ranks)]
        assert join(found).row_ids.tolist() == ids[step * rows : (step + 1) * rows]


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
    for weight in (float("nan"), float("inf"), -0.3):
        with pytest.raises(InputError, match=rf"has weight {weight}: give a positive weight"):
            loader((folders[0], 0.7), (folders[1], weight))
    with pytest.raises(InputError, match="seed"):
        loader((folders[0], 1.0), seed=-1)
    with pytest.raises(InputError, match="no prepared folder"):
        loader((str(tmp_path), 1.0))
    other = str(write_prepared(tmp_path / "other", [[[4, 5, 6, 1] * 4]], tokenizer="other"))
    with pytest.raises(InputError, match="different tokenizers"):
        loader((folders[0], 1.0), (other, 1.0))
