"""Model folders of diffusers and transformers, trusted only as far as data goes: safetensors, no code."""

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from ttv_train.errors import UserError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DATA_FILES = ["*.safetensors", "*.json", "*.model", "*.txt"]


def model_folder(path: str, key: str) -> Path:
    """The local folder of a model: `path` itself, or the safetensors and settings of a hub id, fetched if need be.

    Args:
        path: a folder, a hub id ``ORG/NAME``, or a folder inside one, ``ORG/NAME/SUBFOLDER``.
        key: config key of `path`, for errors.

    Raises:
        UserError: there is no such folder or hub id.
    """
    if Path(path).is_dir():
        return Path(path)
    parts = path.split("/")
    if len(parts) < 2 or path.startswith((".", "/", "~")):
        raise UserError(f"{key} {path}: no such folder; give a local model folder or a hub id such as ORG/NAME/vae")
    subfolder = "/".join(parts[2:])
    patterns = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in DATA_FILES]
    try:
        root = snapshot_download("/".join(parts[:2]), allow_patterns=patterns)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{key} {path}: neither a local folder nor a hub id that can be fetched ({reason})") from None
    return Path(root) / subfolder


def read_model_config(folder: Path, key: str) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UserError: it is missing or malformed, asks for code from the folder, or the weights are not safetensors.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key} {folder}: no config.json; give the folder of one model, such as FOLDER/vae") from None
    except ValueError as error:
        raise UserError(f"{key} {folder}/config.json is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{key} {folder}/config.json is not a JSON object")
    if "auto_map" in config:
        raise UserError(f"{key} {folder}: config.json asks for code from the folder (auto_map), which is never run")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        found = f"only {pickled[0]}, which is a pickle and could run code" if pickled else "no weights"
        raise UserError(f"{key} {folder}: {found}; convert the weights to safetensors")
    return config


def weights_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the folder's safetensors files and its config.json."""
    total = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        with file.open("rb") as stream:
            total.update(f"{file.name}:{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
