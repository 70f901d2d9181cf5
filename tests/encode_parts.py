"""An encoding job on clips that are made up, so that what it does with them can be tested in milliseconds."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from ttv_train.config import DatasetConfig, RunConfig
from ttv_train.config_file import parse_config
from ttv_train.data.clips import Clip
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import BadVideoError
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.parallel.rng import keyed_generator

BUCKETS = ["4x16x24", "4x24x16"]


def make_clip(number: int, caption: str | None = None, name: str | None = None, start_seconds: float = 0.0) -> Clip:
    """A clip of video `number`; a name with "broken" in it cannot be decoded."""
    frames, height, width = (4, 16, 24) if number % 3 else (4, 24, 16)
    name = f"{number:02d}.mp4" if name is None else name
    return Clip(
        source=VideoSource(Path("/clips") / name, name, f"caption {number}" if caption is None else caption),
        source_sha256=hashlib.sha256(str(number).encode()).hexdigest(),
        bucket=(frames, height, width),
        start_seconds=start_seconds,
        fps=8.0,
        index=0,
        is_last=False,
    )


class FakeDecoder:
    """Noise keyed by the source in place of frames."""

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config

    def __enter__(self) -> "FakeDecoder":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def decode(self, clip: Clip) -> torch.Tensor:
        if "broken" in clip.source.name:
            raise BadVideoError("no frame can be decoded")
        generator = keyed_generator(clip.source_sha256, str(clip.start_seconds))
        return torch.from_numpy(generator.integers(256, size=(*clip.bucket, 3), dtype="uint8"))


def fake_list_clips(clips: list[Clip]) -> Callable[..., tuple[list[Clip], list[QuarantineRow]]]:
    """Stands in for `list_clips`; the dataset also has a file that is no video."""

    def list_clips(
        config: DatasetConfig, valid_num_frames: object, **options: object
    ) -> tuple[list[Clip], list[QuarantineRow]]:
        return clips, [QuarantineRow(name="notes.mp4", reason="no video stream", stage="probe")]

    return list_clips


def make_config(folder: Path, **sections: dict) -> RunConfig:
    """A run that encodes to `folder`/latents, three samples to a shard."""
    data = {
        "output_dir": str(folder / "run"),
        "device": {"backend": "cpu"},
        "dataset": {"path": str(folder), "buckets": BUCKETS},
        "vae": {"kind": "wavelet", "spatial_levels": 2, "temporal_levels": 1, "channels": 8},
        "text_encoder": {"kind": "hash", "hidden_size": 8, "max_length": 4},
        "latents": {"path": str(folder / "latents"), "samples_per_shard": 3},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return parse_config(data)


def stored_bytes(config: RunConfig) -> dict[str, bytes]:
    """Every object of the store, by name, without half-written files."""
    root = Path(config.latents.path)
    files = [path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".partial-")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}
