"""An encoded dataset for other trainers: webdataset tar shards, or Parquet files with the columns of FastVideo.

The columns are those of FastVideo's `pyarrow_schema_t2v` (fastvideo/dataset/dataloader/schema.py). Latents are the
posterior's mean, not normalized; they and the embeddings, of which padding was not stored, are float32, since numpy has
no bfloat16.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ttv_train.data.shards import LatentSample, LatentStore, pack_shard
from ttv_train.errors import UserError

SAMPLES_PER_FILE = 64
TENSOR_COLUMNS = (("bytes", pa.binary()), ("shape", pa.list_(pa.int64())), ("dtype", pa.string()))
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        *((f"vae_latent_{name}", kind) for name, kind in TENSOR_COLUMNS),
        *((f"text_embedding_{name}", kind) for name, kind in TENSOR_COLUMNS),
        ("file_name", pa.string()),
        ("caption", pa.string()),
        ("media_type", pa.string()),
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("num_frames", pa.int64()),
        ("duration_sec", pa.float64()),
        ("fps", pa.float64()),
    ]
)


def export_dataset(store: LatentStore, folder: Path, layout: str) -> int:
    """Writes an encoded dataset to a new folder; returns the number of files.

    Args:
        store: the dataset.
        folder: must not exist, or be empty.
        layout: `webdataset` or `fastvideo`.

    Raises:
        UserError: the folder cannot be used.
        CorruptSampleError: a sample is not what was written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--export {folder}: not an empty folder; name one that does not exist")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--export {folder} cannot be written: {error.strerror}; choose another folder") from None
    count = 0
    for count, samples in enumerate(_chunks(store), 1):
        if layout == "webdataset":
            content, _ = pack_shard(samples)
            (folder / f"shard-{count - 1:06d}.tar").write_bytes(content)
        else:
            table = pa.Table.from_pylist([_row(sample) for sample in samples], schema=SCHEMA)
            pq.write_table(table, folder / f"data-{count - 1:06d}.parquet", compression="zstd", row_group_size=1)
    return count


def _chunks(store: LatentStore) -> Iterator[list[LatentSample]]:
    samples = map(store.read, store.entries)
    while chunk := list(islice(samples, SAMPLES_PER_FILE)):
        yield chunk


def _row(sample: LatentSample) -> dict[str, Any]:
    entry = sample.entry
    num_frames, height, width = entry.bucket
    return {
        "id": entry.key,
        **_tensor_columns("vae_latent", sample.mean),
        **_tensor_columns("text_embedding", sample.prompt_embeds),
        "file_name": entry.source_name,
        "caption": entry.caption,
        "media_type": "image" if num_frames == 1 else "video",
        "width": width,
        "height": height,
        "num_frames": num_frames,
        "duration_sec": num_frames / entry.fps,
        "fps": entry.fps,
    }


def _tensor_columns(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    array = tensor.float().numpy()
    return {f"{name}_bytes": array.tobytes(), f"{name}_shape": list(array.shape), f"{name}_dtype": str(array.dtype)}
