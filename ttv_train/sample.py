"""From a checkpoint and prompts to video files, on all ranks together."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ttv_train.checkpoint.layout import stored_step
from ttv_train.checkpoint.load import latest_verified, load_weights
from ttv_train.checkpoint.verify import refuse_damaged
from ttv_train.config import RunConfig, SamplingConfig
from ttv_train.data.collate import normalized_first_frames, pad_prompts
from ttv_train.data.mixing import open_latents
from ttv_train.devices import get_backend
from ttv_train.diffusion import build_objective
from ttv_train.diffusion.base import Objective
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.encoders.text import max_text_tokens
from ttv_train.encoders.vae import build_vae
from ttv_train.encoders.vae.base import VideoVae
from ttv_train.errors import UserError
from ttv_train.generate import generate, to_uint8
from ttv_train.models import FAMILIES
from ttv_train.models.base import ModelFamily
from ttv_train.models.build import build_model
from ttv_train.models.experts import OtherExpert, build_other_expert
from ttv_train.monitor.samples import SampledVideo, step_folder, video_name, write_prompts
from ttv_train.monitor.video import write_video
from ttv_train.parallel.agreement import on_all_ranks, on_every_rank, on_main_rank
from ttv_train.parallel.mesh import ParallelMesh, build_mesh, distributed
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.prompts import (
    Prompt,
    PromptTensors,
    add_first_frames,
    captions,
    encode_prompts,
    negative_prompt,
    stored_prompts,
)

logger = logging.getLogger(__name__)


def run(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    prompts: Sequence[str] | None = None,
    images: Sequence[Path] | None = None,
    use_ema: bool = True,
    output: Path | None = None,
) -> list[Path]:
    """Samples one video per prompt from a checkpoint, with all ranks that the config's degrees need.

    Args:
        checkpoint: a checkpoint folder; by default the newest of the run that verifies.
        prompts: by default, captions of the encoded dataset.
        images: first frames of the videos, one per prompt, for image-to-video models. They are cropped and scaled to
            the first bucket; captions of the dataset come with those of their clips.
        use_ema: whether to use the average of the weights, where the checkpoint has one.
        output: folder of the videos and their prompts.json; by default `samples/step-N` of the run.

    Returns:
        The videos, in the order of the prompts.

    Raises:
        UserError: on every rank, if there is no intact checkpoint, or it does not fit the config.
    """
    backend = get_backend(config.device.backend)
    with distributed(backend, config.parallel.timeout_seconds) as device:
        mesh = build_mesh(config.parallel, device)
        run_folder = Path(config.output_dir)
        if checkpoint is None:
            checkpoint = latest_verified(run_folder / "checkpoints")
        else:
            refuse_damaged(checkpoint)
        if checkpoint is None:
            raise UserError(f"output_dir {run_folder} has no checkpoint; train first, or name one with --checkpoint")

        vae = build_vae(config.vae, device)
        if images is not None and prompts is None:
            raise UserError("--image needs a --prompt for each image; give them, or leave it out")
        if prompts is None:
            store = on_every_rank(lambda: open_latents(config.latents, config.storage))
            requests = on_every_rank(lambda: stored_prompts(store, captions(store)))
            null_prompt = negative_prompt(config, store.null_prompt())
        else:
            requests, null_prompt = on_every_rank(lambda: encode_prompts(config, prompts, device))
            if images is not None:
                requests = on_every_rank(lambda: add_first_frames(requests, images, vae, config.first_frame, device))
        model, sequence = build_model(
            config,
            mesh,
            latent_channels=vae.latent_channels,
            text_hidden_size=null_prompt[0].shape[-1],
            compute_dtype=getattr(torch, config.training.precision),
        )
        if FAMILIES[config.model.family].takes_first_frame(model) and any(
            request.first_frame is None for request in requests
        ):
            raise UserError("--prompt: an image-to-video model starts from images; give --image FILE for each prompt")
        load_weights(checkpoint, model, use_ema)
        sampler = build_sampler(config, mesh, model, sequence, vae, null_prompt)
        folder = output or step_folder(run_folder, on_main_rank(lambda: stored_step(checkpoint)))
        paths = sampler.write_videos(requests, run_folder, folder)
        if mesh.is_main:
            for request, path in zip(requests, paths, strict=True):
                print(f"{path}: {request.text}")
        return paths


def build_sampler(
    config: RunConfig,
    mesh: ParallelMesh,
    model: nn.Module,
    sequence: SequenceParallel,
    vae: VideoVae,
    null_prompt: PromptTensors,
) -> "Sampler":
    """The sampler of a run's model, with the other expert where the config has one.

    Raises:
        UserError: on every rank, if the model cannot be sampled as the config says.
    """
    family, compute_dtype = FAMILIES[config.model.family], getattr(torch, config.training.precision)
    return Sampler(
        model=model,
        family=family,
        objective=build_objective(config.objective, family),
        sequence=sequence,
        mesh=mesh,
        vae=vae,
        null_prompt=null_prompt,
        max_text_tokens=max_text_tokens(config.text_encoder),
        compute_dtype=compute_dtype,
        config=config.sampling,
        other_expert=build_other_expert(
            config,
            mesh,
            sequence,
            latent_channels=vae.latent_channels,
            text_hidden_size=null_prompt[0].shape[-1],
            compute_dtype=compute_dtype,
        ),
    )


@dataclass
class Sampler:
    """Everything that sampling takes besides the prompts: a model on its ranks, and the encoders' counterparts."""

    model: nn.Module
    family: ModelFamily
    objective: Objective
    sequence: SequenceParallel
    mesh: ParallelMesh
    vae: VideoVae
    null_prompt: PromptTensors
    """What guidance leads away from."""
    max_text_tokens: int
    compute_dtype: torch.dtype
    config: SamplingConfig
    other_expert: OtherExpert | None = None

    def __post_init__(self) -> None:
        """Raises UserError if the model has no use for `sampling.negative_prompt`."""
        own = self.family.null_prompt(self.model) is not None
        if self.config.negative_prompt and (own or self.family.embeds_guidance(self.model)):
            reason = "has an embedding of its own for it" if own else "takes the guidance scale as an input"
            raise UserError(
                f"sampling.negative_prompt {self.config.negative_prompt!r}: the model {reason}; leave it out"
            )

    def write_videos(self, prompts: Sequence[Prompt], run_folder: Path, folder: Path) -> list[Path]:
        """Samples the prompts, one at a time on each data-parallel rank, and writes them with their prompts.json.

        All ranks call it together. A rank that runs out of prompts repeats the last one without writing it, because
        sharded parameters are gathered by all ranks together.

        Returns:
            The videos, in the order of the prompts.

        Raises:
            UserError, OSError: on every rank, if the model cannot be sampled so or a file cannot be written.
        """
        rows: list[SampledVideo] = []
        for turn in range(0, len(prompts), self.mesh.data_degree):
            index = turn + self.mesh.data_rank
            prompt = prompts[min(index, len(prompts) - 1)]
            video = self._generate(prompt)[0].cpu()
            writes = index < len(prompts) and self.mesh.sequence_rank == 0
            written = on_all_ranks(
                lambda: self._write(prompt, video, index, run_folder, folder) if writes else None  # noqa: B023
            )
            rows += [row for row in written if row is not None]
        on_main_rank(lambda: write_prompts(folder, rows))
        return [folder / row.file for row in rows]

    def _generate(self, prompt: Prompt) -> torch.Tensor:
        embeds, mask = pad_prompts([prompt.tensors], self.max_text_tokens)
        null_embeds, null_mask = pad_prompts([self.null_prompt], self.max_text_tokens)
        return generate(
            self.model,
            self.family,
            self.objective,
            self.vae,
            self.vae.normalization,
            embeds.to(self.compute_dtype),
            mask,
            (null_embeds[0], null_mask[0]),
            bucket=prompt.bucket,
            fps=prompt.fps,
            sampling=self.config,
            sample_keys=[prompt.key],
            device=self.mesh.device,
            sequence=self.sequence,
            other_expert=self.other_expert,
            first_frame=self._first_frame(prompt),
        )

    def _first_frame(self, prompt: Prompt) -> FirstFrame | None:
        """A batch of one, normalized; None for text-to-video models."""
        if not self.family.takes_first_frame(self.model):
            return None
        return normalized_first_frames([prompt.first_frame], self.vae.normalization)

    def _write(self, prompt: Prompt, video: torch.Tensor, index: int, run_folder: Path, folder: Path) -> SampledVideo:
        folder.mkdir(parents=True, exist_ok=True)
        row = SampledVideo(
            file=video_name(index, prompt.text),
            prompt=prompt.text,
            key=prompt.key,
            source_name=prompt.source_name,
            reference=self._write_reference(prompt, run_folder),
        )
        write_video(folder / row.file, video, prompt.fps)
        return row

    def _write_reference(self, prompt: Prompt, run_folder: Path) -> str | None:
        """The clip as the VAE gives it back: written once, since its key names its content."""
        if prompt.clip_latents is None:
            return None
        name = re.sub(r"[^A-Za-z0-9._-]", "-", prompt.key)
        path = run_folder / "references" / f"{name}.mp4"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with torch.no_grad():
                clip = self.vae.decode(prompt.clip_latents[None].float().to(self.mesh.device))
            write_video(path, to_uint8(clip)[0], prompt.fps)
        return str(path.relative_to(run_folder))
