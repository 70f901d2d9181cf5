import threading
import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.latent_samples import MemoryDataset, make_entry
from tests.unit.data.test_collate import make_collator
from ttv_train.data import read_ahead
from ttv_train.data.loader import LatentLoader
from ttv_train.data.order import DataOrder
from ttv_train.errors import UserError


def make_loader(dataset, *, rank=0, degree=1, micro_batch_size=2, global_batch_size=4, bad=None):
    bad = [] if bad is None else bad
    return LatentLoader(
        store=dataset,
        entries=dataset.entries,
        order=DataOrder(
            [entry.bucket for entry in dataset.entries], seed=0, digest="d", global_batch_size=global_batch_size
        ),
        collator=make_collator(dataset),
        data_rank=rank,
        data_degree=degree,
        micro_batch_size=micro_batch_size,
        on_bad_sample=lambda entry, reason: bad.append((entry.key, reason)),
    )


def keys(loader, start, stop):
    return [[key for batch in batches for key in batch.keys] for batches in loader.steps(start, stop)]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_ranks_together_load_the_global_batch_in_order(degree):
    dataset = MemoryDataset([make_entry(i) for i in range(10)])
    expected = keys(make_loader(dataset), 0, 6)
    by_rank = [keys(make_loader(dataset, rank=rank, degree=degree), 0, 6) for rank in range(degree)]
    assert [list(chain(*parts)) for parts in zip(*by_rank, strict=True)] == expected


def test_starting_later_gives_the_same_batches():
    dataset = MemoryDataset([make_entry(i) for i in range(10)])
    assert keys(make_loader(dataset), 4, 8) == keys(make_loader(dataset), 0, 8)[4:]


def test_micro_batches_cover_an_uneven_rest():
    dataset = MemoryDataset([make_entry(i) for i in range(5)])
    (batches,) = make_loader(dataset, micro_batch_size=3, global_batch_size=5).steps(0, 1)
    assert [len(batch.keys) for batch in batches] == [3, 2]


def test_a_corrupt_sample_is_reported_once_and_replaced_alike_on_every_layout():
    entries = [make_entry(i) for i in range(8)]
    bad = []
    whole = keys(make_loader(MemoryDataset(entries, corrupt=("sample-3",)), bad=bad), 0, 6)
    halves = [keys(make_loader(MemoryDataset(entries, corrupt=("sample-3",)), rank=r, degree=2), 0, 6) for r in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == whole
    clean = keys(make_loader(MemoryDataset(entries)), 0, 6)
    for replaced, original in zip(chain(*whole), chain(*clean), strict=True):
        assert replaced != "sample-3"
        assert replaced == original or original == "sample-3"
    assert [key for key, _ in bad] == ["sample-3"]
    assert "flipped on purpose" in bad[0][1]


def test_a_bucket_without_a_readable_sample_stops_the_run():
    entries = [make_entry(i) for i in range(20)] + [make_entry(99, bucket=(8, 32, 48))]
    loader = make_loader(MemoryDataset(entries, corrupt=("sample-99",)))
    with pytest.raises(UserError, match="not one sample of bucket 8x32x48 can be read"):
        keys(loader, 0, 6)


def test_closing_early_ends_the_thread():
    dataset = MemoryDataset([make_entry(i) for i in range(8)])
    steps = make_loader(dataset).steps(0, 10_000)
    next(steps)
    steps.close()
    assert "latent-loader" not in [thread.name for thread in threading.enumerate()]
    assert len(dataset.reads) < 100


class UnevenDataset(MemoryDataset):
    """Every third batch is ready later than those after it."""

    def read_many(self, entries):
        self.asked = getattr(self, "asked", 0) + 1
        time.sleep(0.003 * (self.asked % 3 == 1))
        return super().read_many(entries)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.tuples(st.integers(1, 9), st.integers(0, 9)),
    ranks=st.integers(1, 4),
    ranks_after=st.integers(1, 4),
    micro_batch_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    readers=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    data=st.data(),
)
def test_a_run_resumed_on_another_layout_shows_an_epoch_once(
    counts, ranks, ranks_after, micro_batch_sizes, readers, data
):
    """Union over ranks, for a global batch that 1 to 4 ranks can share, stopped at any step, on 1 to 4 reading threads
    of which some take longer than others."""
    entries = [make_entry(i) for i in range(12 * counts[0])]
    entries += [make_entry(100 + i, bucket=(8, 32, 48)) for i in range(12 * counts[1])]

    def run(degree, micro_batch_size, num_readers, start, stop):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(read_ahead, "MAX_STEPS_IN_FLIGHT", num_readers)
            by_rank = [
                keys(
                    make_loader(
                        UnevenDataset(entries),
                        rank=rank,
                        degree=degree,
                        micro_batch_size=micro_batch_size,
                        global_batch_size=12,
                    ),
                    start,
                    stop,
                )
                for rank in range(degree)
            ]
        assert len({len(part) for steps in zip(*by_rank, strict=True) for part in steps}) <= 1
        return [list(chain(*parts)) for parts in zip(*by_rank, strict=True)]

    steps = sum(counts)
    stopped = data.draw(st.integers(0, steps))
    before = run(ranks, micro_batch_sizes[0], readers[0], 0, stopped)
    after = run(ranks_after, micro_batch_sizes[1], readers[1], stopped, steps)
    assert sorted(chain(*before, *after)) == sorted(entry.key for entry in entries)
    assert before + after == run(1, 12, 1, 0, steps)
