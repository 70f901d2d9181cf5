"""Open-Sora 1.2's STDiT3, text to video.

Attention alternates between the locations of a frame and the frames of a location, so the shared dimension is that of
locations, not the whole sequence. Published weights are read as they are published (hpcai-tech/OpenSora-STDiT-v3).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.diffusion.base import Bucket
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.diffusion.flow_matching import FlowSchedule
from ttv_train.errors import UserError
from ttv_train.models.base import LatentShape, ModelFamily, check_channels
from ttv_train.models.diffusers_model import build_diffusers_model, check_encoder_sizes, model_config, split_source
from ttv_train.models.stdit3_layers import SelfAttention
from ttv_train.models.stdit3_model import STDiT3
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan

INERT_KEYS = (
    "architectures",
    "auto_map",
    "class_dropout_prob",
    "enable_flash_attn",
    "enable_layernorm_kernel",
    "enable_sequence_parallelism",
    "freeze_y_embedder",
    "input_size",
    "model_type",
    "only_train_temporal",
    "torch_dtype",
    "transformers_version",
)
"""Keys of published configs that do not change the network: how it was executed and trained."""
FORBIDDEN_KEYS = ("drop_path", "skip_y_embedder")
"""Keys that would change it, and are zero or false in every published config."""


def resolution_shift(bucket: Bucket) -> float:
    """sqrt(pixels of a frame / 512^2) sqrt(latent frames): Open-Sora's VAE makes 5 latent frames of 17."""
    num_frames, height, width = bucket
    latent_frames = 1 if num_frames == 1 else max(1, num_frames // 17 * 5)
    return (height * width * latent_frames) ** 0.5 / 512


class STDiT3Family(ModelFamily):
    """Adapter of `STDiT3`."""

    name = "stdit3"
    solvers = {"flow_matching": ("euler",)}
    flow_schedule = FlowSchedule(shift=resolution_shift)
    uses_prompt_mask = True
    joint_attention = False
    sequence_schemes = ("none", "ulysses", "ring", "usp", "dsp")
    sequence_plan = SequencePlan(shard={"spatial_blocks.0": {"x": 2}}, join={"final_layer": 2})

    def build(self, config: ModelConfig, *, latent_channels: int, text_hidden_size: int) -> nn.Module:
        encoder_sizes = {"in_channels": latent_channels, "caption_channels": text_hidden_size}
        if config.path is None:
            architecture = config.model_copy(update={"config": _architecture(config.config, "model.config")})
            return build_diffusers_model(STDiT3, architecture, encoder_sizes)
        folder = _folder(config.path)
        if folder is None:
            return build_diffusers_model(STDiT3, config, encoder_sizes)
        model = _load_published(folder, config.path)
        check_encoder_sizes(model, encoder_sizes, f"model.path {config.path}")
        return model.train()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        transformer = cast(STDiT3, model)
        pairs = zip(transformer.spatial_blocks, transformer.temporal_blocks, strict=True)
        return [block for pair in pairs for block in pair]

    def num_attention_heads(self, model: nn.Module) -> int:
        return model_config(model).num_heads

    def install_attention(self, model: nn.Module, sequence: SequenceParallel) -> None:
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.sequence = sequence

    def null_prompt(self, model: nn.Module) -> torch.Tensor | None:
        return cast(STDiT3, model).y_embedder.y_embedding

    def check_latents(self, model: nn.Module, latent_shape: LatentShape) -> None:
        check_channels(latent_shape, model_config(model).in_channels)

    def token_grid(self, model: nn.Module, latent_shape: LatentShape) -> tuple[int, int, int]:
        return cast(STDiT3, model).token_grid((latent_shape[1], latent_shape[2], latent_shape[3]))

    def owned_tokens(self, sequence: SequenceParallel, token_grid: tuple[int, int, int]) -> torch.Tensor:
        frames, rows, columns = token_grid
        owned = torch.zeros(frames, rows * columns, dtype=torch.bool)
        owned[:, sequence.owned(rows * columns)] = True
        return owned.view(token_grid)

    def predict(
        self,
        model: nn.Module,
        noisy_latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        prompt_mask: torch.Tensor,
        *,
        fps: torch.Tensor,
        height: int,
        width: int,
        guidance: float = 1.0,
        first_frame: FirstFrame | None = None,
    ) -> torch.Tensor:
        self.check_latents(model, tuple(noisy_latents.shape[1:]))
        out = model(
            noisy_latents,
            timesteps,
            prompt_embeds[:, None],
            prompt_mask,
            fps=fps,
            height=torch.tensor([height]),
            width=torch.tensor([width]),
        )
        # The network predicts x_0 - noise.
        return -out[:, : noisy_latents.shape[1]]


def _architecture(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The constructor arguments in a published config."""
    for key in FORBIDDEN_KEYS:
        if config.get(key):
            raise UserError(f"{origin}: {key} {config[key]} is not supported; remove it")
    return {key: value for key, value in config.items() if key not in (*INERT_KEYS, *FORBIDDEN_KEYS)}


def _folder(path: str) -> Path | None:
    """The local folder of weights that are laid out as Open-Sora publishes them, None for those of diffusers."""
    source, subfolder = split_source(path)
    folder = Path(source)
    if not folder.exists():
        try:
            folder = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            problem = " ".join(str(error).split())[:300]
            raise UserError(
                f"model.path {path}: no such folder, and not to be had from the hub: {problem}; give a folder with "
                "config.json and safetensors weights"
            ) from error
    folder = folder / (subfolder or "")
    return None if (folder / "diffusion_pytorch_model.safetensors").exists() else folder


def _load_published(folder: Path, path: str) -> STDiT3:
    """A model from config.json and model*.safetensors."""
    files = sorted(folder.glob("model*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        model = STDiT3(**_architecture(config, f"model.path {path}"))
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        problem = " ".join(str(error).split())[:300]
        raise UserError(
            f"model.path {path}: no STDiT3 with safetensors weights can be loaded: {problem}; fetch the model again"
        ) from error
    return model
