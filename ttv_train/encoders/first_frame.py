"""First frames for image-to-video models: alone in a grey clip, for the VAE, and as patches of an image encoder."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from ttv_train.config import FirstFrameConfig
from ttv_train.encoders.fingerprint import file_sha256, fingerprint
from ttv_train.encoders.model_folder import find_folder, open_model_folder
from ttv_train.errors import UserError

PROCESSOR_FILE = "preprocessor_config.json"
SKIPPED_LAYERS = 1
"""Last layers of the image encoder that Wan 2.1 leaves out."""


def first_frame_alone(pixels: torch.Tensor) -> torch.Tensor:
    """Clips (B, 3, T, H, W) in [-1, 1] with grey in place of all frames but the first."""
    alone = torch.zeros_like(pixels)
    alone[:, :, 0] = pixels[:, :, 0]
    return alone


class FirstFrameEncoder:
    """What is encoded besides the clip when `first_frame.enabled` is set.

    Raises:
        UserError: `first_frame.image_encoder_path` is not a pipeline of diffusers with a CLIPVisionModel.
    """

    def __init__(self, config: FirstFrameConfig, device: torch.device) -> None:
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._device = device
        self._folder = None
        path = config.image_encoder_path
        if path is None:
            return
        self._folder = open_model_folder(f"{path}/image_encoder", "first_frame.image_encoder_path", "model")
        architecture = self._folder.architecture
        if not architecture.startswith("CLIPVision"):
            raise UserError(
                f"first_frame.image_encoder_path {path}: its image_encoder is a {architecture}, not a CLIPVisionModel; "
                "give the folder of an image-to-video pipeline of Wan 2.1"
            )
        key = "first_frame.image_encoder_path"
        self._processor_folder = find_folder(f"{path}/image_processor", key, (PROCESSOR_FILE,))
        if not (self._processor_folder / PROCESSOR_FILE).is_file():
            raise UserError(f"{key} {path}: no image_processor/{PROCESSOR_FILE} in it; fetch the pipeline again")

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides what a given frame is encoded to. Reads the weight files."""
        if self._folder is None:
            return fingerprint({"first_frame": "latents"})
        return fingerprint(
            {
                "first_frame": "latents and embeds",
                "weights": self._folder.weights_sha256,
                "processor": file_sha256(Path(self._processor_folder, PROCESSOR_FILE)),
                "skipped_layers": SKIPPED_LAYERS,
                "dtype": str(self._dtype),
            }
        )

    @property
    def embeds_shape(self) -> tuple[int, int] | None:
        """Patches and width (N, D) of a frame's embedding; None without an image encoder."""
        if self._folder is None:
            return None
        config = self._folder.config
        return (config["image_size"] // config["patch_size"]) ** 2 + 1, config["hidden_size"]

    @torch.no_grad()
    def embed(self, frames: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Embeds frames, uint8 (H, W, 3) each, as (B, N, D); None without an image encoder."""
        if self._folder is None:
            return None
        images = self._processor(images=[frame.cpu().numpy() for frame in frames], return_tensors="pt")
        pixels = images["pixel_values"].to(self._device, self._dtype)
        hidden: torch.Tensor = self._model(pixels, output_hidden_states=True).hidden_states[-1 - SKIPPED_LAYERS]
        return hidden

    @cached_property
    def _processor(self) -> Any:
        return transformers.CLIPImageProcessor.from_pretrained(self._processor_folder, local_files_only=True)

    @cached_property
    def _model(self) -> Any:
        assert self._folder is not None
        return self._folder.load(transformers.CLIPVisionModel, self._device, dtype=self._dtype)
