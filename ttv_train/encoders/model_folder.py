"""Folders of pretrained encoders, from a local disk or the Hugging Face hub: JSON and safetensors, never code."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ttv_train.encoders.fingerprint import file_sha256
from ttv_train.errors import UserError

HUB_PATH = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)+")
PICKLE_SUFFIXES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}


@dataclass(frozen=True)
class ModelFolder:
    """A folder that holds a `config.json` and safetensors weights."""

    path: Path
    key: str
    """The config key that named it, for errors."""
    config: dict[str, Any]
    weight_files: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """The class that a model of transformers was saved from; `None` if its config does not say."""
        return str((self.config.get("architectures") or [None])[0])

    @cached_property
    def weights_sha256(self) -> list[str]:
        """Digests of the weight files in order of their names. Reads them all: seconds for gigabytes."""
        return [file_sha256(path) for path in self.weight_files]

    def load(self, model_class: Any, device: torch.device, **dtype: torch.dtype) -> Any:
        """The model with its weights on a device, for inference.

        Args:
            model_class: of diffusers or transformers.
            dtype: under the name by which its library knows it.

        Raises:
            UserError: the weights lack one of the model's, which the libraries would make up.
        """
        model, loading = model_class.from_pretrained(
            self.path, use_safetensors=True, local_files_only=True, output_loading_info=True, **dtype
        )
        if loading["missing_keys"]:
            raise UserError(f"{self.key} {self.path}: weights lack {min(loading['missing_keys'])}; fetch them again")
        return model.to(device).eval().requires_grad_(False)


def open_model_folder(path: str, key: str, weights_stem: str) -> ModelFolder:
    """Finds the config and the weight files of a model, and refuses what could run code.

    Args:
        path: local folder, or hub id ``owner/name`` with an optional subfolder, as in ``owner/name/vae``.
        key: the config key that named the path, for errors.
        weights_stem: ``diffusion_pytorch_model`` in folders of diffusers, ``model`` in those of transformers.

    Raises:
        UserError: there is no such folder, its config is damaged or asks for remote code, or its weights are absent or
            pickled.
    """
    patterns = ("config.json", f"{weights_stem}.safetensors*", f"{weights_stem}-*.safetensors")
    folder = find_folder(path, key, patterns)
    if Path(path).is_dir():
        for file in sorted(folder.iterdir()):
            if file.suffix in PICKLE_SUFFIXES:
                raise UserError(
                    f"{key} {path}: {file.name} is a pickle, which can run code when it is read; convert the "
                    "weights to safetensors and remove it"
                )
    config = _read_json(folder / "config.json", key)
    if "auto_map" in config:
        raise UserError(
            f"{key} {path}: config.json asks for remote code (auto_map), which is never run; use a built-in class"
        )
    return ModelFolder(folder, key, config, _weight_files(folder, key, weights_stem))


def find_folder(path: str, key: str, patterns: tuple[str, ...]) -> Path:
    """A local folder as it is; else the files of a hub repository that fit `patterns`, downloaded into the hub's cache.

    Raises:
        UserError: `path` is no folder, and the hub has nothing by that name or cannot be reached.
    """
    if path and Path(path).is_dir():
        return Path(path)
    if not HUB_PATH.fullmatch(path):
        raise UserError(f"{key} {path!r}: no such folder; give a folder, or a hub id such as owner/name/vae")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    owner, name, *subfolder = PurePosixPath(path).parts
    prefix = "".join(f"{part}/" for part in subfolder)
    try:
        snapshot = snapshot_download(f"{owner}/{name}", allow_patterns=[prefix + pattern for pattern in patterns])
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{key} {path}: no such folder here, and not to be had from the hub: {reason}") from None
    return Path(snapshot, *subfolder)


def _weight_files(folder: Path, key: str, stem: str) -> tuple[Path, ...]:
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise UserError(f"{key} {folder}: no {single.name} in it; give a folder with safetensors weights")
    names = sorted({str(name) for name in _read_json(index, key).get("weight_map", {}).values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{key} {folder}: {index.name} names {name!r}, which is not there; fetch the weights again")
    return tuple(folder / name for name in names)


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key} {path.parent}: no {path.name} in it; give the folder of one model") from None
    except ValueError as error:
        raise UserError(f"{key} {path}: not valid JSON: {error}; fetch the file again") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{key} {path}: a JSON object is expected, not a {type(content).__name__}; fetch the file again"
        )
    return content
