from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.storage.doors import CONTENT, ScriptedDoor, batched
from ttv_train.storage.ranges import ByteRange, coalesce

RANGES = st.lists(
    st.builds(ByteRange, st.sampled_from("ab"), st.integers(0, 60), st.one_of(st.none(), st.integers(0, 20))),
    max_size=8,
)


@settings(deadline=None)  # it starts threads
@given(RANGES, st.integers(0, 10), st.integers(1, 40))
def test_requests_answer_every_range_once(ranges, max_gap, max_length):
    requests = coalesce(ranges, max_gap, max_length)
    assert sorted(index for request in requests for index in request.members) == list(range(len(ranges)))
    for request in requests:
        assert len(request.members) == 1 or request.length <= max_length
    door = ScriptedDoor({"a": CONTENT[:70], "b": CONTENT[100:150]})
    expected = [door.objects[r.name][r.offset : None if r.length is None else r.offset + r.length] for r in ranges]
    assert batched(door, max_gap, max_length).read_many(ranges) == expected


def test_neighbours_are_one_request():
    door = ScriptedDoor()
    batched(door, max_gap=5).read_many([ByteRange("a", 20, 10), ByteRange("a", 0, 10), ByteRange("a", 14, 4)])
    assert door.reads == [("a", 0, 30)]


def test_a_whole_object_is_read_to_its_end():
    door = ScriptedDoor()
    batched(door).read_many([ByteRange("a", 0, 10, "digest", is_whole=True)])
    assert door.reads == [("a", 0, None)]


def test_a_missing_object_costs_itself_only():
    missing, found = batched(ScriptedDoor()).read_many([ByteRange("b", 0, 1), ByteRange("a", 0, 1)])
    assert isinstance(missing, FileNotFoundError)
    assert found == CONTENT[:1]
