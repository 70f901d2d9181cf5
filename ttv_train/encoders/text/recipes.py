"""How each model family has its captions embedded: cleaning, template, length, padding, layer.

As the families' pipelines do it, for published weights understand no other embeddings. All of it is data, so that it
can be part of the fingerprint of an encoded dataset.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, cast

from ttv_train.errors import UserError

HUNYUAN_VIDEO_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)


@dataclass(frozen=True)
class TextRecipe:
    """From a caption to its embedding."""

    architecture: str
    """Class of transformers."""
    max_length: int
    """Tokens of a caption; longer ones are cut."""
    encoder_masks_padding: bool
    """Whether the text encoder's attention skips the padding."""
    padding: Literal["kept", "zeroed", "masked"]
    """What the diffusion model is given beyond the caption: the encoder's embeddings of the padding, zeros, or what it
    masks. Only what is kept is stored."""
    cleaning: Literal["none", "whitespace", "caption"] = "none"
    """`whitespace` mends broken Unicode and HTML entities and joins white space; `caption` also lowers the case and
    removes addresses, markup and marks."""
    template: str = "{}"
    """What a caption is set into."""
    crop_start: int = 0
    """Leading tokens, those of the template, whose embeddings are dropped; they do not count as a caption's."""
    skipped_layers: int = 0
    """Last layers of the text encoder that are left out."""
    pooled_length: int = 0
    """Tokens that a second encoder, CLIP, pools to one embedding, which becomes the first row of the caption's; 0 for
    families without one."""

    @property
    def num_rows(self) -> int:
        """Rows of the longest caption's embedding."""
        return self.max_length + (self.pooled_length > 0)


RECIPES: Mapping[str, TextRecipe] = {
    "cogvideox": TextRecipe("T5EncoderModel", 226, encoder_masks_padding=False, padding="kept"),
    "stdit3": TextRecipe("T5EncoderModel", 300, encoder_masks_padding=True, padding="masked", cleaning="caption"),
    "wan": TextRecipe("UMT5EncoderModel", 512, encoder_masks_padding=True, padding="zeroed", cleaning="whitespace"),
    "hunyuan_video": TextRecipe(
        "LlamaModel",
        256,
        encoder_masks_padding=True,
        padding="masked",
        template=HUNYUAN_VIDEO_TEMPLATE,
        crop_start=95,
        skipped_layers=2,
        pooled_length=77,
    ),
    "ltx_video": TextRecipe("T5EncoderModel", 128, encoder_masks_padding=False, padding="masked"),
}
"""By `text_encoder.recipe`, which is the family's name."""

DEFAULT_LENGTH = 226
PLAIN_RECIPES: Mapping[str, TextRecipe] = {
    "CLIPTextModel": TextRecipe("CLIPTextModel", DEFAULT_LENGTH, encoder_masks_padding=False, padding="kept"),
    "T5EncoderModel": TextRecipe("T5EncoderModel", DEFAULT_LENGTH, encoder_masks_padding=False, padding="kept"),
    "UMT5EncoderModel": TextRecipe("UMT5EncoderModel", DEFAULT_LENGTH, encoder_masks_padding=True, padding="zeroed"),
}
"""Without `text_encoder.recipe`, by architecture."""


def clean(caption: str, recipe: TextRecipe) -> str:
    """The caption as the recipe has it cleaned.

    Raises:
        UserError: a package that cleans is not installed. Captions cleaned by halves would give other embeddings.
    """
    if recipe.cleaning == "none":
        return caption
    for package, distribution in (("ftfy", "ftfy"), ("bs4", "beautifulsoup4")):
        if find_spec(package) is None:
            raise UserError(
                f"text_encoder.recipe: captions are cleaned with {distribution}, which is not installed; run "
                "pip install 'ttv-train[captions]'"
            )
    if recipe.cleaning == "whitespace":
        import ftfy

        caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
        return re.sub(r"\s+", " ", caption).strip()
    # The cleaning that Open-Sora has from PixArt. It is applied twice, as in the training of the published weights.
    from diffusers import PixArtAlphaPipeline

    pipeline = cast(Any, PixArtAlphaPipeline)
    for _ in range(2):
        caption = pipeline._clean_caption(pipeline, caption)
    return caption
