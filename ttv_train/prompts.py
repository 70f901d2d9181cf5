"""What videos are sampled from: captions of the encoded dataset, or prompts with, for image-to-video models, images."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from ttv_train.config import FirstFrameConfig, RunConfig, parse_bucket
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.shards import CorruptSampleError, LatentEntry
from ttv_train.diffusion.base import Bucket
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.encoders.first_frame import FirstFrameEncoder
from ttv_train.encoders.text import build_text_encoder
from ttv_train.encoders.vae.base import VideoVae
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_main_rank

logger = logging.getLogger(__name__)

PromptTensors = tuple[torch.Tensor, torch.Tensor]
"""Embedding (L, D) and mask (L,) bool, True where there is a token."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")
"""The only ones that Pillow may try: each more is another parser that a file can attack."""
DEFAULT_PROMPTS = 16
"""Captions of the dataset that are sampled when no prompt is given, at most."""


@dataclass(frozen=True)
class Prompt:
    """What one video is sampled from."""

    text: str
    key: str
    """Key of the initial noise."""
    tensors: PromptTensors
    bucket: Bucket
    fps: float
    source_name: str | None = None
    """File in the dataset folder whose caption this is."""
    clip_latents: torch.Tensor | None = None
    """That clip, (C, t, h, w), not normalized; it is decoded and kept beside the samples."""
    first_frame: FirstFrame | None = None
    """For image-to-video models; not normalized."""


def stored_prompts(store: LatentDataset, entries: Sequence[LatentEntry]) -> list[Prompt]:
    """The captions of encoded clips, with their embeddings as training sees them.

    Raises:
        UserError: a sample fails its checksum.
    """
    prompts = []
    for entry in entries:
        try:
            stored = store.read(entry)
        except CorruptSampleError as error:
            raise UserError(
                f"latents.path {store.path}: {error}; remove {error.shard} and run `ttv-train encode` again"
            ) from None
        prompts.append(
            Prompt(
                text=entry.caption,
                key=entry.key,
                tensors=(stored.prompt_embeds, stored.prompt_mask),
                bucket=entry.bucket,
                fps=entry.fps,
                source_name=entry.source_name,
                clip_latents=stored.mean,
                first_frame=stored.first_frame,
            )
        )
    return prompts


def captions(store: LatentDataset) -> list[LatentEntry]:
    """The first clip of each caption, up to `DEFAULT_PROMPTS` of them."""
    by_caption: dict[str, LatentEntry] = {}
    for entry in store.entries:
        by_caption.setdefault(entry.caption, entry)
    if len(by_caption) > DEFAULT_PROMPTS:
        logger.info("sampling %d of the dataset's %d captions", DEFAULT_PROMPTS, len(by_caption))
    return list(by_caption.values())[:DEFAULT_PROMPTS]


def encode_prompts(
    config: RunConfig, prompts: Sequence[str], device: torch.device
) -> tuple[list[Prompt], PromptTensors]:
    """Prompts in the shape of the first bucket, and what guidance leads away from. The text encoder is freed again."""
    text_encoder = build_text_encoder(config.text_encoder, device)
    embeds, mask = text_encoder.encode([*prompts, config.sampling.negative_prompt])
    bucket = parse_bucket(config.dataset.buckets[0])
    requests = []
    for i, text in enumerate(prompts):
        # A prompt that is given twice is to give two videos.
        key = f"{text} #{list(prompts[:i]).count(text)}"
        requests.append(Prompt(text, key, (embeds[i], mask[i]), bucket, config.dataset.fps))
    return requests, (embeds[-1], mask[-1])


def negative_prompt(config: RunConfig, empty: PromptTensors) -> PromptTensors:
    """What guidance leads away from: `sampling.negative_prompt`, embedded on the CPU by rank 0, or else `empty`. All
    ranks call it together."""
    text = config.sampling.negative_prompt

    def encode() -> PromptTensors:
        embeds, mask = build_text_encoder(config.text_encoder, torch.device("cpu")).encode([text])
        return embeds[0], mask[0]

    return on_main_rank(encode) if text else empty


def add_first_frames(
    prompts: Sequence[Prompt],
    images: Sequence[Path],
    vae: VideoVae,
    config: FirstFrameConfig,
    device: torch.device,
) -> list[Prompt]:
    """The prompts with the images as first frames of their videos.

    Raises:
        UserError: not one image per prompt, an image that cannot be read, or `first_frame.enabled` is not set.
    """
    if len(images) != len(prompts):
        raise UserError(f"--image is given {len(images)} times and --prompt {len(prompts)} times; give one image each")
    if not config.enabled:
        raise UserError("--image needs an image-to-video model, and first_frame.enabled is false; leave it out")
    encoder = FirstFrameEncoder(config, device)
    framed = []
    for prompt, path in zip(prompts, images, strict=True):
        num_frames, height, width = prompt.bucket
        frame = read_image(path, height, width)
        pixels = torch.zeros(1, 3, num_frames, height, width, device=device)
        pixels[:, :, 0] = frame.to(device).permute(2, 0, 1).float() / 127.5 - 1
        embeds = encoder.embed([frame])
        first_frame = FirstFrame(vae.encode(pixels).mean[0], None if embeds is None else embeds[0])
        framed.append(replace(prompt, first_frame=first_frame))
    return framed


def read_image(path: Path, height: int, width: int) -> torch.Tensor:
    """An image file as RGB uint8 (H, W, 3), cropped around its middle and scaled to a size.

    Raises:
        UserError: there is no such image.
    """
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.BICUBIC)
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(
            f"--image {path}: not an image that can be read: {error}; give a PNG, JPEG or WebP file"
        ) from error
    return torch.from_numpy(np.asarray(fitted).copy())
