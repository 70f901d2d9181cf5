from collections import Counter

import pytest

from tests.encode_parts import make_clip
from ttv_train.data.units import plan_units

WANTED = {str(number): make_clip(number) for number in range(20)}


def keys(unit):
    return [key for key, _ in unit.clips]


def test_every_clip_that_is_not_fresh_is_in_one_unit():
    units = plan_units(WANTED, {"3", "5"}, samples_per_shard=4)
    assert Counter(key for unit in units for key in keys(unit)) == Counter(WANTED.keys() - {"3", "5"})
    assert max(len(unit.clips) for unit in units) == 4
    assert len({unit.name for unit in units}) == len(units)
    assert len({unit.folder for unit in units}) == 1


def test_units_are_bounded_by_size():
    units = plan_units(WANTED, {}, samples_per_shard=100, shard_bytes=10, sample_bytes=lambda bucket: 3)
    assert [len(unit.clips) for unit in units] == [3] * 6 + [2]


def test_a_clip_larger_than_a_shard_is_alone():
    units = plan_units(WANTED, {}, samples_per_shard=100, shard_bytes=10, sample_bytes=lambda bucket: 11)
    assert [len(unit.clips) for unit in units] == [1] * 20


@pytest.mark.parametrize("fresh", [{"3"}, set()])
def test_another_plan_has_another_folder(fresh):
    assert (
        plan_units(WANTED, {"4"}, samples_per_shard=4)[0].folder
        != plan_units(WANTED, fresh, samples_per_shard=4)[0].folder
    )


def test_nothing_to_do():
    assert plan_units(WANTED, WANTED, samples_per_shard=4) == []
