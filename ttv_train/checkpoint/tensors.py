"""Sharded tensors to and from safetensors files, by torch's distributed checkpoint.

`HuggingFaceStorageWriter` and `HuggingFaceStorageReader` were chosen after trying them on FSDP2 shards over gloo: they
store uneven and empty shards, replicated tensors (once) and scalars, read them back on any number of ranks, and, unlike
torch's own format, involve no pickle on disk. A failure on one rank is raised on all of them. What they lack is done in
this room: they neither commit nor check what they read.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ttv_train.parallel.agreement import world_size

FILE_BYTES = 2**30
"""About how much one rank puts into one file: a file is built in host memory before it is written."""


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes this rank's shards of `tensors` into `folder`, which is made; on all ranks, each with the same names.

    Raises:
        OSError: on every rank, if any rank could not write.
    """
    file_of, total = {}, 0
    for name, tensor in tensors.items():
        file_of[name] = 1 + total // (FILE_BYTES * world_size())
        total += math.prod(tensor.shape) * tensor.element_size()
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of, save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise _plain(error) from error


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fills `tensors`, of any sharding over any number of ranks, in place; on all ranks, each with the same names.

    Raises:
        RuntimeError: on every rank, if a tensor is not there or has another shape.
        OSError: on every rank, if any rank could not read.
    """
    try:
        dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise _plain(error) from error


def stored_shapes(folder: Path) -> dict[str, torch.Size]:
    """Global shape of every tensor in `folder` of which all shards are there, by name."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {
        name: stored.size
        for name, stored in metadata.items()
        # Where a shard is missing, reading would leave a hole and not say so.
        if isinstance(stored, TensorStorageMetadata)
        and sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(stored.size)
    }


def _plain(error: CheckpointException) -> Exception:
    """An exception that `except Exception` catches: an OSError if all that went wrong is input and output."""
    rank, (first, _) = min(error.failures.items())
    if all(isinstance(failure, OSError) for failure, _ in error.failures.values()):
        return OSError(f"rank {rank}: {first}")
    return RuntimeError(str(error))
