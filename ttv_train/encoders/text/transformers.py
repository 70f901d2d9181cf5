"""The text encoders of transformers, called by the recipe of a model family."""

from dataclasses import asdict, replace
from functools import cached_property

import torch

from ttv_train.config import TransformersTextEncoderConfig
from ttv_train.encoders.fingerprint import fingerprint
from ttv_train.encoders.text.pretrained import PretrainedTextModel, is_pipeline
from ttv_train.encoders.text.recipes import PLAIN_RECIPES, RECIPES, TextRecipe, clean
from ttv_train.errors import UserError


class TransformersTextEncoder:
    """One pretrained text model, and a second one that pools where the recipe has it.

    Raises:
        UserError: `text_encoder.path` is not a supported model or pipeline, or not the one of the recipe.
    """

    def __init__(self, config: TransformersTextEncoderConfig, device: torch.device) -> None:
        dtype: torch.dtype = getattr(torch, config.dtype)
        pipeline = is_pipeline(config.path)
        path = f"{config.path}/text_encoder" if pipeline else config.path
        default_tokenizer = f"{config.path}/tokenizer" if pipeline else config.path
        self._text = PretrainedTextModel(path, config.tokenizer_path or default_tokenizer, dtype, device)
        self._recipe = _recipe(config, self._text)
        self._pooling: PretrainedTextModel | None = None
        if self._recipe.pooled_length:
            if not pipeline:
                raise UserError(
                    f"text_encoder.path {config.path}: recipe {config.recipe} has two text encoders; give the folder "
                    "of the pipeline, with text_encoder, tokenizer, text_encoder_2 and tokenizer_2 in it"
                )
            second = (f"{config.path}/text_encoder_2", f"{config.path}/tokenizer_2")
            self._pooling = PretrainedTextModel(*second, dtype, device)
            if self._pooling.architecture != "CLIPTextModel" or self._pooling.hidden_size > self._text.hidden_size:
                raise UserError(
                    f"text_encoder.path {second[0]}: {self._pooling.architecture} of width "
                    f"{self._pooling.hidden_size}; recipe {config.recipe} pools with a CLIPTextModel no wider than "
                    f"the first encoder's {self._text.hidden_size}"
                )
        self.max_length = self._recipe.num_rows
        self.stores_padding = self._recipe.padding == "kept"
        self.hidden_size = self._text.hidden_size
        self._device = device

    @cached_property
    def fingerprint(self) -> str:
        """Digest of recipe, settings, weights, tokenizers and dtype. The first access reads the weight files."""
        models = [model.fingerprint() for model in (self._text, self._pooling) if model is not None]
        return fingerprint({"text_encoder": asdict(self._recipe), "models": models})

    @torch.no_grad()
    def encode(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TextEncoder.encode`; the first row is the pooled embedding, zero-padded, where the recipe has one."""
        recipe = self._recipe
        captions = [clean(caption, recipe) for caption in captions]
        texts = [recipe.template.replace("{}", caption) for caption in captions]
        ids, attention_mask = self._text.tokenize(texts, recipe.max_length + recipe.crop_start)
        outputs = self._text.model(
            input_ids=ids,
            attention_mask=attention_mask if recipe.encoder_masks_padding else None,
            output_hidden_states=recipe.skipped_layers > 0,
        )
        embeds: torch.Tensor = outputs.last_hidden_state
        if recipe.skipped_layers:
            embeds = outputs.hidden_states[-1 - recipe.skipped_layers]
        embeds, mask = embeds[:, recipe.crop_start :], attention_mask[:, recipe.crop_start :].bool()
        if recipe.padding == "zeroed":
            embeds = embeds.masked_fill(~mask[..., None], 0)
        if self._pooling is None:
            return embeds, mask
        pooled = embeds.new_zeros(len(captions), 1, self.hidden_size)
        ids, _ = self._pooling.tokenize(captions, recipe.pooled_length)
        pooled[:, 0, : self._pooling.hidden_size] = self._pooling.model(input_ids=ids).pooler_output
        return torch.cat([pooled, embeds], dim=1), torch.cat([mask.new_ones(len(captions), 1), mask], dim=1)


def _recipe(config: TransformersTextEncoderConfig, model: PretrainedTextModel) -> TextRecipe:
    """The recipe that the config names, or the architecture's plain one, with the config's length."""
    if config.recipe is None:
        if model.architecture not in PLAIN_RECIPES:
            raise UserError(
                f"text_encoder.path {model.path}: {model.architecture} needs a text_encoder.recipe; set it to the "
                "model's family"
            )
        recipe = PLAIN_RECIPES[model.architecture]
    else:
        recipe = RECIPES[config.recipe]
        if recipe.architecture != model.architecture:
            raise UserError(
                f"text_encoder.path {model.path}: {model.architecture}, but recipe {config.recipe} takes a "
                f"{recipe.architecture}; give the text encoder of that family"
            )
    return recipe if config.max_length is None else replace(recipe, max_length=config.max_length)
