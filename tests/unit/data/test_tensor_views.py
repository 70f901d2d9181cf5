import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from ttv_train.data.tensor_views import DTYPES, view_tensors

SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(st.dictionaries(st.text(max_size=5), st.tuples(SHAPES, st.sampled_from(list(DTYPES.values()))), max_size=5))
def test_gives_what_the_library_gives(described):
    content = save({name: torch.ones(shape).to(dtype) for name, (shape, dtype) in described.items()})
    expected, views = load(content), view_tensors(memoryview(bytearray(content)))
    assert views.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (views[name].dtype, views[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(views[name], tensor)


def test_shares_memory_that_can_be_written_to_and_copies_other():
    content = save({"mean": torch.zeros(3)})
    own = bytearray(content)
    view_tensors(memoryview(own))["mean"].fill_(1.0)
    assert load(bytes(own))["mean"].tolist() == [1.0, 1.0, 1.0]
    view_tensors(content)["mean"].fill_(1.0)
    assert load(content)["mean"].tolist() == [0.0, 0.0, 0.0]


def file_of(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor_of(**changes: object) -> dict[str, object]:
    return {"mean": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 8 + b"{}",
        b"\x02" + b"\x00" * 7 + b"{",
        b"\x02" + b"\x00" * 7 + b"{]",
        file_of([]),
        file_of({"mean": 3}),
        file_of(tensor_of(dtype="F8"), b"\x00" * 8),
        file_of(tensor_of(dtype=["F32"]), b"\x00" * 8),
        file_of(tensor_of(shape=[3]), b"\x00" * 8),
        file_of(tensor_of(shape=[-1, -2]), b"\x00" * 8),
        file_of(tensor_of(shape=["2"]), b"\x00" * 8),
        file_of(tensor_of(data_offsets=[0]), b"\x00" * 8),
        file_of(tensor_of(data_offsets=[-8, 0]), b"\x00" * 8),
        file_of(tensor_of(data_offsets=[4, 12]), b"\x00" * 12),
        file_of(tensor_of(), b"\x00" * 4),
        file_of(tensor_of(), b"\x00" * 9),
        file_of(tensor_of() | {"other": tensor_of()["mean"]}, b"\x00" * 8),
    ],
)
def test_refuses_what_is_no_such_file(content):
    with pytest.raises(ValueError):
        view_tensors(content)


@given(st.binary(max_size=200), st.integers(0, 199))
def test_damage_gives_tensors_or_a_value_error(noise, position):
    content = bytearray(file_of(tensor_of(), b"\x00" * 8))
    content[position % len(content) : position % len(content) + len(noise)] = noise
    with contextlib.suppress(ValueError):
        view_tensors(bytes(content))
