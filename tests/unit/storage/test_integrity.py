import hashlib

import pytest
import xxhash

from tests.unit.storage.doors import CONTENT, ScriptedDoor, batched, part
from ttv_train.storage.failures import DamagedReadError
from ttv_train.storage.integrity import VerifiedReads
from ttv_train.storage.ranges import ByteRange


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda content: content[:-1], "short"),
        (lambda content: content + b"x", "long"),
        (lambda content: bytes(len(content)), "corrupt"),
    ],
)
def test_other_bytes_than_were_written_are_an_error(fault, kind):
    store = VerifiedReads(batched(ScriptedDoor(faults=[fault])))
    with pytest.raises(DamagedReadError) as error:
        store.read_range(part(10, 20))
    assert error.value.kind == kind
    assert store.read_range(part(10, 20)) == CONTENT[10:30]


def test_a_whole_object_that_has_grown_is_an_error():
    store = VerifiedReads(batched(ScriptedDoor({"a": b"written, and more"})))
    with pytest.raises(DamagedReadError, match="17 bytes of 7"):
        store.read_range(ByteRange("a", 0, 7, hashlib.sha256(b"written").hexdigest(), is_whole=True))


def test_one_bad_part_of_a_joined_request_costs_itself_only():
    def flip(content: bytes) -> bytes:
        return content[:5] + bytes([content[5] ^ 1]) + content[6:]

    store = VerifiedReads(batched(ScriptedDoor(faults=[flip])))
    bad, good = store.read_many([part(0, 10), part(10, 10)])
    assert isinstance(bad, DamagedReadError)
    assert good == CONTENT[10:20]


@pytest.mark.parametrize("length", [1, 16, 240, 1000])
def test_the_quick_checksum_notices_every_flipped_bit(length):
    written = CONTENT[:length]
    wanted = ByteRange("a", 0, length, xxh3=xxhash.xxh3_128_hexdigest(written))
    for position in range(8 * length):
        flipped = bytearray(written)
        flipped[position // 8] ^= 1 << position % 8
        store = VerifiedReads(batched(ScriptedDoor({"a": bytes(flipped)})))
        with pytest.raises(DamagedReadError, match="not those that were written"):
            store.read_range(wanted)
    assert VerifiedReads(batched(ScriptedDoor())).read_range(wanted) == written
