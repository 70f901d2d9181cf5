"""Builds transformers of diffusers: new from a config, or from safetensors weights. Every mistake is named."""

import difflib
import inspect
import traceback
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from torch import nn

from ttv_train.config import ModelConfig
from ttv_train.errors import UserError

Model = TypeVar("Model", bound=ModelMixin)


def build_diffusers_model(model_class: type[Model], config: ModelConfig, encoder_sizes: dict[str, int]) -> Model:
    """A float32 model on the CPU, in training mode.

    Args:
        model_class: the family's class of diffusers.
        encoder_sizes: constructor arguments that the encoders decide, such as `in_channels`. They complete
            `config.config`, and must agree with it or with the config of the weights.

    Raises:
        UserError: unknown or impossible `model.config` keys, weights that cannot be loaded or are incomplete, or sizes
            that differ from `encoder_sizes`.
    """
    model = _new(model_class, config.config, encoder_sizes) if config.path is None else _load(model_class, config.path)
    check_encoder_sizes(model, encoder_sizes, "model.config" if config.path is None else f"model.path {config.path}")
    return model.train()


def check_encoder_sizes(model: nn.Module, encoder_sizes: dict[str, int], origin: str) -> None:
    """Refuses a model whose config differs from what the encoders give.

    Raises:
        UserError: naming the key and both sizes.
    """
    for key, size in encoder_sizes.items():
        found = model_config(model)[key]
        if found != size:
            mend = "use the vae and text_encoder of the model's family, or set the key in model.config"
            if key == "in_channels" and found > size:
                mend = "use its own vae, or a text-to-video model: of this family, image to video is not supported"
            raise UserError(f"{origin}: {key} is {found}, but the encoders give {size}; {mend}")


def check_keys(config: dict[str, Any], allowed: list[str], origin: str) -> None:
    """Refuses keys of a free-form section that are not in `allowed`, with the nearest one that is.

    Raises:
        UserError: naming the key.
    """
    for key in config:
        if key not in allowed:
            close = difflib.get_close_matches(str(key), allowed, n=1)
            mend = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(allowed)}"
            raise UserError(f"{origin}: unknown key {key}; {mend}")


def _new(model_class: type[Model], config: dict[str, Any], encoder_sizes: dict[str, int]) -> Model:
    allowed = [name for name in inspect.signature(model_class.__init__).parameters if name != "self"]
    check_keys(config, allowed, f"model.config of {model_class.__name__}")
    try:
        return model_class(**encoder_sizes | config)
    except (TypeError, ValueError, RuntimeError, AssertionError, ZeroDivisionError) as error:
        raise UserError(
            f"model.config: {model_class.__name__} cannot be built: {_one_line(error)}; change the sizes that disagree"
        ) from error


def _load(model_class: type[Model], path: str) -> Model:
    source, subfolder = split_source(path)
    try:
        model, loading = model_class.from_pretrained(
            source, subfolder=subfolder, use_safetensors=True, torch_dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"model.path {path}: no {model_class.__name__} with safetensors weights can be loaded: {_one_line(error)}; "
            "give the transformer's folder of a model of this family"
        ) from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[problem]:
            names = ", ".join(map(str, list(loading[problem])[:3]))
            raise UserError(
                f"model.path {path}: weights with {problem.replace('_', ' ')}: {names}; fetch the model again, or set "
                "model.family to its family"
            )
    return model


def split_source(path: str) -> tuple[str, str | None]:
    """A local folder, or a hub id `owner/name` that may be followed by a folder inside it, as repository and folder."""
    if Path(path).exists():
        return path, None
    owner_and_name, folder = path.split("/")[:2], path.split("/")[2:]
    return "/".join(owner_and_name), "/".join(folder) or None


def _one_line(error: Exception) -> str:
    # An assertion of diffusers has no message; what it asserted is the next best.
    message = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    return " ".join(message.split())[:300]


def model_config(model: nn.Module) -> Any:
    """Constructor arguments of a diffusers model, by attribute or key."""
    return model.config
