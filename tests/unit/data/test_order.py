from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttv_train.data.order import DataOrder
from ttv_train.errors import UserError

BUCKETS = [(8, 96, 160), (16, 96, 160), (8, 160, 96)]


@settings(max_examples=60, deadline=None)
@given(
    buckets=st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=40),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 3),
)
def test_an_epoch_shows_every_sample_and_repeats_only_to_fill_batches(buckets, batch_size, seed):
    order = DataOrder(buckets, seed=seed, digest="d", global_batch_size=batch_size)
    for epoch in range(2):
        steps = range(epoch * order.batches_per_epoch, (epoch + 1) * order.batches_per_epoch)
        batches = [order.batch(step) for step in steps]
        seen = Counter(index for batch in batches for index in batch.indices)
        assert set(seen) == set(range(len(buckets)))
        assert sum(seen.values()) - len(buckets) == order.repeated_per_epoch
        for batch in batches:
            assert batch.epoch == epoch
            assert len(batch.indices) == batch_size
            assert {buckets[index] for index in batch.indices} == {batch.bucket}


def test_the_order_is_a_function_of_seed_digest_and_step():
    def indices(seed=0, digest="d", steps=range(30)):
        order = DataOrder(BUCKETS * 5, seed=seed, digest=digest, global_batch_size=2)
        return [order.batch(step) for step in steps]

    assert indices() == indices()
    assert indices(steps=range(29, -1, -1)) == indices()[::-1]  # addressed, not consumed
    assert indices(seed=1) != indices()
    assert indices(digest="e") != indices()


def test_threads_in_different_epochs_do_not_disturb_each_other():
    order = DataOrder(BUCKETS * 2, seed=0, digest="d", global_batch_size=1)
    expected = [order.batch(step) for step in range(600)]
    with ThreadPoolExecutor(4) as pool:
        passes = list(pool.map(lambda _: [order.batch(step) for step in range(600)], range(4)))
    assert passes == [expected] * 4


def test_epochs_differ():
    order = DataOrder([BUCKETS[0]] * 12, seed=0, digest="d", global_batch_size=12)
    assert order.batch(0).indices != order.batch(1).indices


def test_replacements_stay_in_the_bucket_and_reach_every_member():
    buckets = BUCKETS * 4
    order = DataOrder(buckets, seed=0, digest="d", global_batch_size=2)
    batch = order.batch(3)
    replacements = [order.replacement(batch, 1, attempt) for attempt in range(4)]
    assert {buckets[index] for index in replacements} == {batch.bucket}
    assert len(set(replacements)) == 4


def test_an_empty_dataset_is_refused():
    with pytest.raises(UserError, match="no sample is left"):
        DataOrder([], seed=0, digest="d", global_batch_size=1)


entries_of_buckets = st.lists(st.sampled_from(BUCKETS), min_size=1, max_size=40)


def epoch_batches(order, epoch):
    return [order.batch(step) for step in range(epoch * order.batches_per_epoch, (epoch + 1) * order.batches_per_epoch)]


@settings(max_examples=60, deadline=None)
@given(buckets=entries_of_buckets, batch_size=st.integers(1, 5), seed=st.integers(0, 3))
def test_dropping_the_tail_shows_no_sample_twice_in_an_epoch(buckets, batch_size, seed):
    options = {"seed": seed, "digest": "d", "global_batch_size": batch_size, "tail": "drop"}
    if min(Counter(buckets).values()) < batch_size:
        with pytest.raises(UserError, match=r"training\.tail drop: bucket .* fewer than its batch"):
            DataOrder(buckets, **options)
        return
    order = DataOrder(buckets, **options)
    for epoch in range(2):
        seen = Counter(index for batch in epoch_batches(order, epoch) for index in batch.indices)
        assert set(seen.values()) == {1}
        assert len(buckets) - len(seen) == order.dropped_per_epoch == len(buckets) - order.samples_per_epoch
    assert order.repeated_per_epoch == 0


@settings(max_examples=40, deadline=None)
@given(buckets=entries_of_buckets, sizes=st.tuples(*[st.integers(1, 6)] * 3))
def test_every_bucket_has_its_own_batch_size(buckets, sizes):
    batch_sizes = dict(zip(BUCKETS, sizes, strict=True))
    order = DataOrder(buckets, seed=0, digest="d", global_batch_size=99, batch_sizes=batch_sizes)
    batches = epoch_batches(order, 0)
    assert all(len(batch.indices) == batch_sizes[batch.bucket] for batch in batches)
    assert {index for batch in batches for index in batch.indices} == set(range(len(buckets)))
    assert sum(len(batch.indices) for batch in batches) == order.samples_per_epoch


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(5, 30), min_size=2, max_size=3),
    weights=st.lists(st.floats(0.2, 5), min_size=3, max_size=3),
    seed=st.integers(0, 3),
)
def test_sources_are_mixed_by_weight_and_each_is_gone_through_before_it_repeats(counts, weights, seed):
    sources = [source for source, count in enumerate(counts) for _ in range(count)]
    weights = weights[: len(counts)]
    order = DataOrder(
        [BUCKETS[0]] * len(sources), seed=seed, digest="d", global_batch_size=1, sources=sources, weights=weights
    )
    drawn = [batch.indices[0] for epoch in range(8) for batch in epoch_batches(order, epoch)]
    shares = Counter(sources[index] for index in drawn[: order.batches_per_epoch])
    for source, weight in enumerate(weights):
        assert shares[source] == max(1, round(len(sources) * weight / sum(weights)))
        times = Counter(index for index in drawn if sources[index] == source)
        if len(times) == counts[source]:
            # Epochs are shuffled, so within one the border between two passes is blurred; over all of them it is not.
            assert max(times.values()) - min(times.values()) <= 1
        else:
            assert max(times.values()) == 1


def test_weights_like_the_sizes_draw_every_entry_once():
    sources = [0] * 6 + [1] * 18
    order = DataOrder((BUCKETS[:2] * 12), seed=0, digest="d", global_batch_size=3, sources=sources, weights=[1.0, 3.0])
    for epoch in range(3):
        drawn = sorted(index for batch in epoch_batches(order, epoch) for index in batch.indices)
        assert drawn == list(range(24))
