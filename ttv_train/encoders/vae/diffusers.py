"""The video VAEs of diffusers, from a local folder or the hub."""

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import diffusers
import torch
import torch.distributed as dist
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from safetensors import safe_open

from ttv_train.config import DiffusersVaeConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.encoders.model_folder import open_model_folder
from ttv_train.encoders.vae.base import LatentDistribution, LatentNormalization, check_bucket
from ttv_train.encoders.vae.parallel import ParallelEncoder
from ttv_train.encoders.vae.split import ROWS, TIME
from ttv_train.errors import UserError


class LatentGeometry(NamedTuple):
    """How a VAE's latents relate to its pixels."""

    channels: int
    spatial_factor: int
    temporal_factor: int


def _cogvideox(config: dict[str, Any]) -> LatentGeometry:
    spatial_factor = 2 ** (len(config["block_out_channels"]) - 1)
    return LatentGeometry(config["latent_channels"], spatial_factor, int(config["temporal_compression_ratio"]))


def _wan(config: dict[str, Any]) -> LatentGeometry:
    return LatentGeometry(config["z_dim"], config["scale_factor_spatial"], config["scale_factor_temporal"])


def _hunyuan_video(config: dict[str, Any]) -> LatentGeometry:
    return LatentGeometry(
        config["latent_channels"], config["spatial_compression_ratio"], config["temporal_compression_ratio"]
    )


def _ltx_video(config: dict[str, Any]) -> LatentGeometry:
    if config["timestep_conditioning"]:
        raise UserError(
            "vae.path: this LTX VAE takes part in the denoising (timestep_conditioning), which is not supported; use "
            "the VAE of LTX-Video 0.9"
        )
    scaling = 2 ** sum(config["spatio_temporal_scaling"])
    return LatentGeometry(
        config["latent_channels"],
        config["spatial_compression_ratio"] or config["patch_size"] * scaling,
        config["temporal_compression_ratio"] or config["patch_size_t"] * scaling,
    )


# Causal VAEs, which encode the first frame alone and then `temporal_factor` frames per latent frame. Only these classes
# are ever built: a config.json names its class, and a name must not be able to choose arbitrary code.
GEOMETRIES: dict[str, Callable[[dict[str, Any]], LatentGeometry]] = {
    "AutoencoderKLCogVideoX": _cogvideox,
    "AutoencoderKLHunyuanVideo": _hunyuan_video,
    "AutoencoderKLLTXVideo": _ltx_video,
    "AutoencoderKLWan": _wan,
}


class DiffusersVae:
    """A causal video VAE of diffusers. The ranks of `group` encode each clip together, in the modes that do so.

    Raises:
        UserError: the folder is not a VAE of a class in `GEOMETRIES` with safetensors weights.
    """

    def __init__(
        self, config: DiffusersVaeConfig, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._folder = open_model_folder(config.path, "vae.path", "diffusion_pytorch_model")
        self._class_name = str(self._folder.config.get("_class_name"))
        if self._class_name not in GEOMETRIES:
            raise UserError(
                f"vae.path {config.path}: {self._class_name} is not a supported video VAE; supported: "
                f"{', '.join(GEOMETRIES)}"
            )
        self._parallel = config.parallel
        self._group = group
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._class = getattr(diffusers, self._class_name)
        # An older config.json lacks the arguments that its class has got since.
        defaults = {name: parameter.default for name, parameter in inspect.signature(self._class).parameters.items()}
        settings = {name: value for name, value in self._folder.config.items() if not name.startswith("_")}
        self._config = {**defaults, **settings}
        self.latent_channels, self.spatial_factor, self.temporal_factor = GEOMETRIES[self._class_name](self._config)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of class, settings, weights, dtype, and of the mode if it is not exact. The first access reads the
        weight files."""
        settings = {
            "vae": self._class_name,
            "config": {name: value for name, value in self._folder.config.items() if not name.startswith("_")},
            "weights": self._folder.weights_sha256,
            "dtype": str(self._dtype),
        }
        if self._parallel.mode == "tiled":
            settings["mode"] = "tiled"
        return fingerprint(settings)

    @cached_property
    def normalization(self) -> LatentNormalization:
        """From the VAE's own config: ``scaling_factor`` and ``shift_factor``, or ``latents_mean`` and ``latents_std``,
        which LTX-Video keeps among its weights.

        CogVideoX 1.5's ``invert_scale_latents`` is about the image that conditions image-to-video, not about latents
        that are denoised: those are multiplied by the factor in every version.
        """
        config = self._config
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if self._class_name == "AutoencoderKLLTXVideo":
            mean, std = self._read_weight("latents_mean"), self._read_weight("latents_std")
        factor = config.get("scaling_factor") or 1.0
        return LatentNormalization(
            shift=tuple(mean or [config.get("shift_factor") or 0.0]),
            scale=tuple(factor / value for value in std or [1.0]),
        )

    def valid_num_frames(self, num_frames: int) -> bool:
        """Whether there is one frame, and then whole latent frames."""
        return num_frames > 0 and (num_frames - 1) % self.temporal_factor == 0

    def latent_shape(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """``(C, t, h, w)`` of a clip. Raises UserError if the VAE cannot take this size."""
        check_bucket(self, num_frames, height, width)
        latent_frames = (num_frames - 1) // self.temporal_factor + 1
        return self.latent_channels, latent_frames, height // self.spatial_factor, width // self.spatial_factor

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> LatentDistribution:
        """See `VideoVae.encode`."""
        posterior = DiagonalGaussianDistribution(self._moments(video.to(self._device, self._dtype)))
        return LatentDistribution(posterior.mean, posterior.logvar)

    def _moments(self, video: torch.Tensor) -> torch.Tensor:
        mode = self._parallel.mode
        if mode == "tiled":
            self._model.enable_tiling()
            try:
                return self._model._encode(video)
            finally:
                self._model.disable_tiling()
        if mode == "none" or (mode != "serial_chunks" and self._group is None):
            return self._model._encode(video)
        return ParallelEncoder(
            self._model,
            temporal_factor=self.temporal_factor,
            spatial_factor=self.spatial_factor,
            dim=ROWS if mode == "space" else TIME,
            group=None if mode == "serial_chunks" else self._group,
            chunk_latent_frames=self._parallel.chunk_latent_frames or (1 if mode == "serial_chunks" else None),
        ).moments(video)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See `VideoVae.decode`."""
        video: torch.Tensor = self._model.decode(latents.to(self._device, self._dtype)).sample
        return video.float().clamp(-1, 1)

    @cached_property
    def _model(self) -> Any:
        return self._folder.load(self._class, self._device, torch_dtype=self._dtype)

    def _read_weight(self, name: str) -> list[float] | None:
        for path in self._folder.weight_files:
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118 - the file is not a dict
                    return file.get_tensor(name).double().tolist()
        return None
