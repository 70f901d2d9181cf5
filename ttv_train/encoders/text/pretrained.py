"""One pretrained text model of transformers with its tokenizer, from a local folder or the hub."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import transformers

from ttv_train.encoders.fingerprint import file_sha256
from ttv_train.encoders.model_folder import find_folder, open_model_folder
from ttv_train.errors import UserError

TOKENIZER_FILES = ("*.json", "*.model", "*.txt")
VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json")
ARCHITECTURES = {
    "CLIPTextModel": "CLIPTextModel",
    "LlamaModel": "LlamaModel",
    "T5EncoderModel": "T5EncoderModel",
    "T5ForConditionalGeneration": "T5EncoderModel",
    "UMT5EncoderModel": "UMT5EncoderModel",
    "UMT5ForConditionalGeneration": "UMT5EncoderModel",
}
"""From the architecture that config.json names to the class that is built; no other is ever built."""


class PretrainedTextModel:
    """Weights and vocabulary are loaded when they are first needed.

    Raises:
        UserError: the folder is not a model of an architecture in `ARCHITECTURES` with safetensors weights, or the
            tokenizer is missing.
    """

    def __init__(self, path: str, tokenizer_path: str, dtype: torch.dtype, device: torch.device) -> None:
        self.path = path
        self._folder = open_model_folder(path, "text_encoder.path", "model")
        named = self._folder.architecture
        if named not in ARCHITECTURES:
            raise UserError(
                f"text_encoder.path {path}: {named} is not a supported text encoder; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[named]
        self.hidden_size = int(self._folder.config.get("d_model") or self._folder.config["hidden_size"])
        self._tokenizer_folder = _find_tokenizer(tokenizer_path)
        self._dtype, self._device = dtype, device

    def fingerprint(self) -> Mapping[str, Any]:
        """What decides the embedding of given text. Reads the weight files."""
        tokenizer_files = {path for pattern in TOKENIZER_FILES for path in self._tokenizer_folder.glob(pattern)}
        settings = {name: value for name, value in self._folder.config.items() if not name.startswith("_")}
        return {
            "config": {name: value for name, value in settings.items() if name != "transformers_version"},
            "weights": self._folder.weights_sha256,
            "tokenizer": {path.name: file_sha256(path) for path in tokenizer_files},
            "dtype": str(self._dtype),
        }

    def tokenize(self, texts: Sequence[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, (B, length) int64 each; longer texts are cut, shorter ones padded at the end."""
        tokens = self._tokenizer(
            list(texts),
            padding="max_length",
            padding_side="right",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        ).to(self._device)
        return tokens["input_ids"], tokens["attention_mask"]

    @cached_property
    def model(self) -> Any:
        """The model on its device, without gradients."""
        return self._folder.load(getattr(transformers, self.architecture), self._device, dtype=self._dtype)

    @cached_property
    def _tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self._tokenizer_folder, local_files_only=True)


def is_pipeline(path: str) -> bool:
    """Whether a local folder or a hub repository is a pipeline of diffusers, with each model in a folder of its own."""
    if Path(path).is_dir():
        return Path(path, "text_encoder").is_dir()
    if len(PurePosixPath(path).parts) != 2:
        return False
    return (find_folder(path, "text_encoder.path", ("model_index.json",)) / "model_index.json").is_file()


def _find_tokenizer(path: str) -> Path:
    """The folder of a tokenizer. Transformers builds one that knows no word where the vocabulary is missing, so that is
    refused here."""
    folder = find_folder(path, "text_encoder.tokenizer_path", TOKENIZER_FILES)
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise UserError(
            f"text_encoder.tokenizer_path {path}: no vocabulary in it ({', '.join(VOCABULARIES)}); set it to the "
            "folder of the tokenizer"
        )
    return folder
