"""Both encoders on batches of clips, and the rule that nothing that is not finite is ever stored."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ttv_train.config import FirstFrameConfig, TextEncoderConfig, VaeConfig
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.encoders import visual_fingerprint
from ttv_train.encoders.first_frame import FirstFrameEncoder, first_frame_alone
from ttv_train.encoders.followers import EncodingGroup, LeadingVae, dismiss_followers, follow
from ttv_train.encoders.text import TextEncoder, build_text_encoder
from ttv_train.encoders.vae import LatentDistribution, VideoVae, build_vae

REMEMBERED_PROMPTS = 128
"""The clips of one video, and those of others that share a caption, follow each other closely."""


@dataclass(frozen=True)
class EncodedClip:
    """One clip and its caption, on the CPU, of the encoders' dtypes."""

    mean: torch.Tensor
    """(C, t, h, w), not normalized."""
    logvar: torch.Tensor | None
    """(C, t, h, w)"""
    prompt_embeds: torch.Tensor
    """(L, D)"""
    prompt_mask: torch.Tensor
    """(L,) bool"""
    first_frame: FirstFrame | None
    """For image-to-video models; its latents are not normalized."""


class NonFiniteError(Exception):
    """A clip whose encoding overflows in float32 too."""


class ClipEncoder:
    """The VAE and the text encoder of a run.

    Half precision can overflow. What comes out non-finite is encoded again in float32, alone, and stored in the
    encoder's dtype if it fits there.

    The first rank of `group` encodes; the others are in `follow` and share the VAE's work on each of its clips.
    """

    def __init__(
        self,
        vae: VaeConfig,
        text_encoder: TextEncoderConfig,
        device: torch.device,
        first_frame: FirstFrameConfig | None = None,
        group: EncodingGroup | None = None,
    ) -> None:
        self._group, self._device = group, device
        self.vae: VideoVae = self._led(vae, number=0)
        self.text_encoder: TextEncoder = build_text_encoder(text_encoder, device)
        self._first_frame_config = first_frame or FirstFrameConfig()
        self._first_frame_encoder: FirstFrameEncoder | None = None
        if self._first_frame_config.enabled:
            self._first_frame_encoder = FirstFrameEncoder(self._first_frame_config, device)
        self.num_float32 = 0
        """Clips that were encoded again in float32 so far."""
        self._prompts: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._vae_config = vae
        self._text_encoder_config = text_encoder

    @cached_property
    def visual_fingerprint(self) -> str:
        """Digest of everything that decides what the frames of a given clip are encoded to."""
        return visual_fingerprint(self.vae, self._first_frame_config)

    @property
    def fingerprints(self) -> tuple[str, str]:
        """Of what encodes frames and of the text encoder."""
        return self.visual_fingerprint, self.text_encoder.fingerprint

    def sample_bytes(self, bucket: tuple[int, int, int]) -> int:
        """About how large a clip of a bucket is when it is encoded, with a caption of full length."""
        latents = 2 * math.prod(self.vae.latent_shape(*bucket)) * _bytes_of(self._vae_config.dtype)
        text = self.text_encoder.max_length * self.text_encoder.hidden_size * _bytes_of(self._text_encoder_config.dtype)
        return latents + text

    def encode(self, videos: Sequence[torch.Tensor], captions: Sequence[str]) -> list[EncodedClip | NonFiniteError]:
        """Encodes clips of one bucket, uint8 (T, H, W, 3) each, and their captions.

        Returns:
            For every clip its encoding, or the error that says why there is none.
        """
        pixels = torch.stack(list(videos)).to(self._device).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        latents = self.vae.encode(pixels)
        first_frames = self._encode_first_frames(pixels, videos)
        encoded: list[EncodedClip | NonFiniteError] = []
        for row, caption in enumerate(captions):
            try:
                mean, logvar = self._finite_latents(pixels[row : row + 1], _row(latents, row))
                embeds, mask = self._encode_prompt(caption)
                first_frame = first_frames[row]
                if isinstance(first_frame, NonFiniteError):
                    raise first_frame
            except NonFiniteError as error:
                encoded.append(error)
                continue
            logvar = None if logvar is None else logvar[0].cpu()
            encoded.append(EncodedClip(mean[0].cpu(), logvar, embeds, mask, first_frame))
        return encoded

    @property
    def is_follower(self) -> bool:
        """Whether this rank only shares the work on the clips of another one."""
        return self._group is not None and self._group.is_follower

    def follow(self) -> None:
        """Shares the leader's work until it dismisses its followers."""
        assert self._group is not None
        follow(self._group, self._device, lambda number: self._float32_vae if number else self.vae)

    def dismiss_followers(self) -> None:
        """Ends `follow` on the other ranks of the group, if there are any."""
        if self._group is not None:
            dismiss_followers(self._group)

    def encode_null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt, on the CPU."""
        return self._encode_prompt("")

    def _encode_prompt(self, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Each caption is embedded alone, so that its bits do not depend on those it happens to be with, and once as
        long as it is remembered. Raises NonFiniteError."""
        if caption in self._prompts:
            self._prompts.move_to_end(caption)
        else:
            embeds, mask = self.text_encoder.encode([caption])
            self._prompts[caption] = self._finite_prompt(caption, embeds[0], mask[0])
            if len(self._prompts) > REMEMBERED_PROMPTS:
                self._prompts.popitem(last=False)
        return self._prompts[caption]

    def _led(self, config: VaeConfig, number: int) -> VideoVae:
        if self._group is None:
            return build_vae(config, self._device)
        vae = build_vae(config, self._device, self._group.work)
        return vae if self._group.is_follower else LeadingVae(vae, self._group, self._device, number)

    def _encode_first_frames(
        self, pixels: torch.Tensor, videos: Sequence[torch.Tensor]
    ) -> Sequence[FirstFrame | NonFiniteError | None]:
        if self._first_frame_encoder is None:
            return [None] * len(videos)
        alone = first_frame_alone(pixels)
        latents = self.vae.encode(alone)
        embeds = self._first_frame_encoder.embed([video[0] for video in videos])
        first_frames: list[FirstFrame | NonFiniteError | None] = []
        for row in range(len(videos)):
            try:
                mean, _ = self._finite_latents(alone[row : row + 1], _row(latents, row))
                if embeds is not None and not _is_finite(embeds[row]):
                    raise NonFiniteError(f"the first frame's embedding is not finite in {embeds.dtype}")
                first_frames.append(FirstFrame(mean[0].cpu(), None if embeds is None else embeds[row].cpu()))
            except NonFiniteError as error:
                first_frames.append(error)
        return first_frames

    def _finite_latents(self, pixels: torch.Tensor, latents: LatentDistribution) -> LatentDistribution:
        if not _is_finite(*latents):
            self.num_float32 += 1
            again = self._float32_vae.encode(pixels)
            dtype = latents.mean.dtype
            latents = LatentDistribution(again.mean.to(dtype), None if again.logvar is None else again.logvar.to(dtype))
            if not _is_finite(*latents):
                raise NonFiniteError(f"latents are not finite in {dtype}, even if computed in float32")
        return latents

    def _finite_prompt(
        self, caption: str, embeds: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored of a prompt, on the CPU: without the padding, where the diffusion model does not see it."""
        if not self.text_encoder.stores_padding:
            length = int(mask.sum())
            assert bool(mask[:length].all()), "padding follows the tokens"
            embeds, mask = embeds[:length], mask[:length]
        if not _is_finite(embeds):
            self.num_float32 += 1
            embeds = self._float32_text_encoder.encode([caption])[0][0, : len(embeds)].to(embeds)
            if not _is_finite(embeds):
                raise NonFiniteError(f"the caption's embedding is not finite in {embeds.dtype}")
        return embeds.cpu(), mask.cpu()

    @cached_property
    def _float32_vae(self) -> VideoVae:
        config = self._vae_config.model_copy(update={"dtype": "float32"})
        return self._led(config, number=1)

    @cached_property
    def _float32_text_encoder(self) -> TextEncoder:
        return build_text_encoder(self._text_encoder_config.model_copy(update={"dtype": "float32"}), self._device)


def _row(latents: LatentDistribution, row: int) -> LatentDistribution:
    mean, logvar = latents
    return LatentDistribution(mean[row : row + 1], None if logvar is None else logvar[row : row + 1])


def _is_finite(*tensors: torch.Tensor | None) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor is not None)


def _bytes_of(dtype: str) -> int:
    return torch.finfo(getattr(torch, dtype)).bits // 8
