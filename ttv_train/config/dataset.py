"""Where clips come from, how they are decoded, and the shapes they are given."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ttv_train.config.section import Section

BUCKET_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+)")


def check_bucket(bucket: str) -> None:
    """Raises ValueError unless `bucket` is FRAMESxHEIGHTxWIDTH."""
    match = BUCKET_PATTERN.fullmatch(bucket)
    if match is None or min(map(int, match.groups())) < 1:
        raise ValueError(f"bucket {bucket!r} is not FRAMESxHEIGHTxWIDTH, such as 49x480x720")


class BucketGrid(Section):
    """Buckets of one size in several shapes and lengths."""

    size: str = Field(pattern=r"^[1-9]\d*x[1-9]\d*$")
    """Height x width that gives the number of pixels, such as 480x720; every shape has about as many."""
    frames: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """Lengths of clips."""
    aspect_ratios: list[Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")]] = ["16:9", "4:3", "1:1", "3:4", "9:16"]
    """Shapes, as width:height."""
    multiple: int = Field(16, ge=1)
    """Height and width are rounded to multiples of it."""

    def buckets(self) -> list[str]:
        """The buckets, as frames x height x width."""
        height, width = map(int, self.size.split("x"))
        shapes = []
        for ratio in self.aspect_ratios:
            across, down = map(int, ratio.split(":"))
            sides = (math.sqrt(height * width * down / across), math.sqrt(height * width * across / down))
            shapes.append("x".join(str(max(round(side / self.multiple), 1) * self.multiple) for side in sides))
        return [f"{frames}x{shape}" for frames in self.frames for shape in shapes]


class DatasetConfig(Section):
    """Where clips come from and how they are decoded."""

    path: str = ""
    """Folder of video clips with captions, or its caption file; see data/README.md for the accepted layouts."""
    layout: Literal[
        "auto", "jsonl", "csv", "json", "toml", "line_files", "sidecars", "webdataset", "parquet", "huggingface"
    ] = "auto"
    """Where the captions are. `auto` takes the only layout that fits, and asks for a choice where several do."""
    fps: float = Field(8.0, gt=0)
    """Frames per second at which clips are sampled, by presentation time. A video whose own frame rate is below three
    quarters of it is dropped, since its frames would repeat."""
    buckets: list[str] = Field(["49x480x720"], min_length=1)
    """Allowed clip shapes, as frames x height x width. A video goes to the bucket nearest in aspect ratio among those
    that it is long enough to fill."""
    bucket_grid: list[BucketGrid] = []
    """Further buckets by size, aspect ratio and length; with it, `buckets` may be left out."""
    keep_probability: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    """Part of the videos that a bucket takes, such as {49x480x720: 0.5}; the others go to the next smaller bucket of
    their aspect ratio, or are dropped where there is none."""
    split: Literal["length", "shots"] = "length"
    """Where videos are cut: `length` takes clips from the start on, one after another; `shots` takes them from within
    shots, found by PySceneDetect (extra `shots`), so that no clip holds a cut."""
    max_clips_per_video: int = Field(1, ge=1)
    """Consecutive, non-overlapping clips cut from one video, at most."""
    decoder: Literal["pyav", "torchcodec", "decord", "auto"] = "pyav"
    """Library that decodes the videos; `torchcodec` and `decord` are extras. A file that the library is known to show
    wrong frames of is refused. `auto` takes for each file the fastest library that is right on it."""
    decode_timeout_seconds: float = Field(60.0, gt=0)
    """A file whose decoding takes longer is quarantined."""
    max_pixels: int = Field(7680 * 4320, gt=0)
    """A video with more pixels per frame is quarantined before any frame is allocated."""
    max_video_seconds: float = Field(3600.0, gt=0)
    """A longer video is quarantined."""

    @model_validator(mode="before")
    @classmethod
    def _expand_grid(cls, data: Any) -> Any:
        """Adds the buckets of the grid to those that are named."""
        if not isinstance(data, dict) or not isinstance(data.get("bucket_grid"), list):
            return data
        named = data.get("buckets", [])
        grid = [bucket for entry in data["bucket_grid"] for bucket in BucketGrid.model_validate(entry).buckets()]
        return data | {"buckets": list(dict.fromkeys([*named, *grid]))} if isinstance(named, list) and grid else data

    @model_validator(mode="after")
    def _keep_probability_of_buckets(self) -> "DatasetConfig":
        for bucket in self.keep_probability:
            if bucket not in self.buckets:
                raise ValueError(f"keep_probability names {bucket!r}, which is none of the buckets {self.buckets}")
        return self

    @field_validator("buckets")
    @classmethod
    def _buckets(cls, value: list[str]) -> list[str]:
        for bucket in value:
            check_bucket(bucket)
        return value


def parse_bucket(bucket: str) -> tuple[int, int, int]:
    """``"49x480x720"`` to ``(49, 480, 720)``: frames, height, width. The config has validated the format."""
    frames, height, width = map(int, bucket.split("x"))
    return frames, height, width
