"""The text encoders of transformers, from a local folder or the hub."""

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ttv_train.config import TransformersTextEncoderConfig
from ttv_train.encoders.fingerprint import file_sha256, fingerprint
from ttv_train.encoders.model_folder import find_folder, open_model_folder
from ttv_train.errors import UserError

TOKENIZER_FILES = ("*.json", "*.model", "*.txt")
VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "vocab.json")


class Recipe(NamedTuple):
    """How the diffusion models that use an encoder call it."""

    class_name: str
    masks_padding: bool
    """Whether attention skips the padding and its embeddings are zero."""


# By the architecture that config.json names; only these classes are ever built. T5 as CogVideoX uses it: the padding is
# attended to, and the diffusion model sees its embeddings. UMT5 as Wan uses it. CLIP's own attention is causal.
RECIPES = {
    "CLIPTextModel": Recipe("CLIPTextModel", masks_padding=False),
    "T5EncoderModel": Recipe("T5EncoderModel", masks_padding=False),
    "T5ForConditionalGeneration": Recipe("T5EncoderModel", masks_padding=False),
    "UMT5EncoderModel": Recipe("UMT5EncoderModel", masks_padding=True),
    "UMT5ForConditionalGeneration": Recipe("UMT5EncoderModel", masks_padding=True),
}


class TransformersTextEncoder:
    """A pretrained encoder; captions are padded to `max_length` tokens.

    Raises:
        UserError: the folder is not a model of an architecture in `RECIPES` with safetensors weights, or the tokenizer
            is missing.
    """

    def __init__(self, config: TransformersTextEncoderConfig, device: torch.device) -> None:
        self._folder = open_model_folder(config.path, "text_encoder.path", "model")
        architecture = str((self._folder.config.get("architectures") or [None])[0])
        if architecture not in RECIPES:
            raise UserError(
                f"text_encoder.path {config.path}: {architecture} is not a supported text encoder; supported: "
                f"{', '.join(RECIPES)}"
            )
        self._recipe = RECIPES[architecture]
        self._path = config.path
        self._tokenizer_folder = _find_tokenizer(config.tokenizer_path or config.path)
        self._device = device
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.max_length = config.max_length
        self.hidden_size = int(self._folder.config.get("d_model") or self._folder.config["hidden_size"])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of recipe, settings, weights, tokenizer and dtype. The first access reads the weight files."""
        tokenizer_files = {path for pattern in TOKENIZER_FILES for path in self._tokenizer_folder.glob(pattern)}
        settings = {name: value for name, value in self._folder.config.items() if not name.startswith("_")}
        return fingerprint(
            {
                "text_encoder": self._recipe,
                "config": {name: value for name, value in settings.items() if name != "transformers_version"},
                "weights": self._folder.weights_sha256,
                "tokenizer": {path.name: file_sha256(path) for path in tokenizer_files},
                "max_length": self.max_length,
                "dtype": str(self._dtype),
            }
        )

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TextEncoder.encode`; whether padding is zero is the recipe's matter."""
        tokens = self._tokenizer(
            captions, padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        ).to(self._device)
        mask = tokens["attention_mask"]
        attention_mask = mask if self._recipe.masks_padding else None
        embeds: torch.Tensor = self._model(tokens["input_ids"], attention_mask=attention_mask).last_hidden_state
        mask = mask.bool()
        return embeds.masked_fill(~mask[..., None], 0) if self._recipe.masks_padding else embeds, mask

    @cached_property
    def _tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self._tokenizer_folder, local_files_only=True)

    @cached_property
    def _model(self) -> Any:
        model, loading = getattr(transformers, self._recipe.class_name).from_pretrained(
            self._folder.path,
            dtype=self._dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        if loading["missing_keys"]:
            missing = sorted(loading["missing_keys"])[0]
            raise UserError(f"text_encoder.path {self._path}: weights lack {missing}; fetch them again")
        return model.to(self._device).eval().requires_grad_(False)


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
