import threading
import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.latent_samples import MemoryDataset, make_entry
from tests.unit.data.test_collate import make_collator
from ttv_train.data.loader import LatentLoader
from ttv_train.data.order import DataOrder
from ttv_train.data.read_ahead import read_ahead
from ttv_train.errors import UserError


def make_loader(dataset, *, rank=0, degree=1, micro_batch_size=2, global_batch_size=4, bad=None, **reading):
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
        **reading,
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
    dataset = MemoryDataset([make_entry(i, length=1) for i in range(8)])
    steps = make_loader(dataset, prefetch_bytes=40).steps(0, 10_000)
    next(steps)
    steps.close()
    assert "latent-loader" not in [thread.name for thread in threading.enumerate()]
    assert len(dataset.reads) < 100


def test_without_workers_a_step_is_read_when_it_is_asked_for():
    dataset = MemoryDataset([make_entry(i) for i in range(8)])
    threads = set(threading.enumerate())
    steps = make_loader(dataset, workers=0).steps(0, 4)
    for count in (4, 8, 12):
        next(steps)
        assert len(dataset.reads) == count
    assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_of_the_storage_reaches_the_trainer(workers):
    class Unavailable(MemoryDataset):
        def read_many(self, entries):
            if self.reads:
                raise UserError("latents.path memory: see that the storage is up")
            return super().read_many(entries)

    steps = make_loader(Unavailable([make_entry(i) for i in range(8)]), workers=workers).steps(0, 4)
    with pytest.raises(UserError, match="see that the storage is up"):
        list(steps)


class Recorded(MemoryDataset):
    """Keeps how many samples each read asked for."""

    def __init__(self, entries, *, joins_reads):
        super().__init__(entries)
        self.joins_reads, self.asked = joins_reads, []

    def read_many(self, entries):
        self.asked.append(len(entries))
        return super().read_many(entries)


@pytest.mark.parametrize(
    ("joins_reads", "max_bytes", "asked"),
    [
        (True, 2**30, [2, 4, 8, 16, 10]),
        (True, 160, [2, 4, 8, 8, 8, 8, 2]),  # 80 bytes for the one being read, and as many for the one before
        (False, 2**30, [2] * 20),
        (True, 0, [2] * 20),
    ],
)
def test_steps_are_read_together_where_that_joins_requests(joins_reads, max_bytes, asked):
    entries = [make_entry(number, length=10) for number in range(40)]
    dataset = Recorded(entries, joins_reads=joins_reads)
    plan = [entries[start : start + 2] for start in range(0, 40, 2)]
    read = list(read_ahead(dataset, plan, workers=1, max_bytes=max_bytes))
    assert [[sample.entry for sample in item] for item in read] == plan
    assert dataset.asked == asked


class UnevenDataset(MemoryDataset):
    """Every third batch is ready later than those after it."""

    def read_many(self, entries):
        self.asked = getattr(self, "asked", 0) + 1
        time.sleep(0.003 * (self.asked % 3 == 1))
        return super().read_many(entries)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.tuples(st.integers(1, 9), st.integers(0, 9)),
    ranks=st.integers(1, 4),
    ranks_after=st.integers(1, 4),
    micro_batch_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    workers=st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 3])),
    prefetched=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    data=st.data(),
)
def test_a_run_resumed_on_another_layout_shows_an_epoch_once(
    counts, ranks, ranks_after, micro_batch_sizes, workers, prefetched, data
):
    """Union over ranks, for a global batch that 1 to 4 ranks can share, stopped at any step, with 0, 1 or 3 loader
    workers of which some take longer than others and that read more or less far ahead."""
    entries = [make_entry(i, length=1) for i in range(12 * counts[0])]
    entries += [make_entry(100 + i, bucket=(8, 32, 48), length=1) for i in range(12 * counts[1])]

    def run(degree, micro_batch_size, num_workers, prefetch_bytes, start, stop):
        by_rank = [
            keys(
                make_loader(
                    UnevenDataset(entries),
                    rank=rank,
                    degree=degree,
                    micro_batch_size=micro_batch_size,
                    global_batch_size=12,
                    workers=num_workers,
                    prefetch_bytes=prefetch_bytes,
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
    before = run(ranks, micro_batch_sizes[0], workers[0], prefetched[0], 0, stopped)
    after = run(ranks_after, micro_batch_sizes[1], workers[1], prefetched[1], stopped, steps)
    assert sorted(chain(*before, *after)) == sorted(entry.key for entry in entries)
    assert before + after == run(1, 12, 0, 0, 0, steps)
