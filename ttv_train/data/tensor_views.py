"""Tensors of a safetensors file in memory, without a copy: `safetensors.torch.load` makes one of every tensor.

Source of the format: https://github.com/huggingface/safetensors#format
"""

import json
import math

import torch

from ttv_train.storage import Content

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
HEADER_LENGTH_BYTES = 8


def view_tensors(content: Content) -> dict[str, torch.Tensor]:
    """The tensors by name. They share the memory of `content`, unless that cannot be written to.

    Raises:
        ValueError: it is not a safetensors file, or has a dtype that samples do not have.
    """
    if memoryview(content).readonly:
        content = memoryview(bytearray(content))
    start = HEADER_LENGTH_BYTES + int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")
    if not HEADER_LENGTH_BYTES < start <= len(content):
        raise ValueError(f"a header of {start - HEADER_LENGTH_BYTES} bytes in a file of {len(content)}")
    try:
        header = json.loads(bytes(content[HEADER_LENGTH_BYTES:start]))
        header.pop("__metadata__", None)
        described = [(*row["data_offsets"], name, DTYPES[row["dtype"]], row["shape"]) for name, row in header.items()]
        tensors, position = {}, 0
        for begin, end, name, dtype, shape in sorted(described, key=lambda row: row[:2]):
            if begin != position or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name} of shape {shape} cannot be bytes {begin} to {end} of the data")
            tensors[name] = _view(content[start + begin : start + end], dtype, shape)
            position = end
    except (AttributeError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"its header is not that of a safetensors file: {error}") from None
    if start + position != len(content):
        raise ValueError(f"{len(content) - start - position} bytes behind its tensors")
    return tensors


def _view(data: Content, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    # torch does not make a tensor of an empty buffer.
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
