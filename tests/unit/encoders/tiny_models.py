"""Tiny pretrained folders with random weights, written by the libraries themselves."""

from pathlib import Path

import diffusers
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ttv_train.verify.tiny_vaes import SETTINGS

TINY_VAES = {
    **SETTINGS,
    "AutoencoderKLCogVideoX": {**SETTINGS["AutoencoderKLCogVideoX"], "scaling_factor": 0.7},
    "AutoencoderKLLTXVideo": {
        **SETTINGS["AutoencoderKLLTXVideo"],
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False),
    },
    "AutoencoderKLWan": {**SETTINGS["AutoencoderKLWan"], "base_dim": 4},
}

WORDS = ("a", "dog", "lies", "on", "the", "floor", "rabbit", "wakes")


def save_vae(folder: Path, class_name: str, **config) -> torch.nn.Module:
    """Writes a VAE of diffusers with seeded weights to `folder` and returns it."""
    torch.manual_seed(0)
    vae = getattr(diffusers, class_name)(**{**TINY_VAES[class_name], **config})
    if class_name == "AutoencoderKLLTXVideo":
        vae.latents_mean.copy_(torch.linspace(-1, 1, 8))
        vae.latents_std.copy_(torch.linspace(0.5, 2, 8))
    vae.save_pretrained(folder)
    return vae.eval()


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of whole words that ends every text with `</s>`, as T5's does."""
    vocabulary = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def save_text_encoder(folder: Path, class_name: str = "T5EncoderModel") -> torch.nn.Module:
    """Writes a text encoder of the T5 family, with its tokenizer, to `folder` and returns it."""
    torch.manual_seed(0)
    config_class = transformers.UMT5Config if class_name.startswith("UMT5") else transformers.T5Config
    config = config_class(vocab_size=16, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    encoder = getattr(transformers, class_name)(config)
    encoder.save_pretrained(folder)
    save_tokenizer(folder)
    return encoder.eval()


def save_text_pipeline(folder: Path, family: str) -> dict[str, torch.nn.Module]:
    """Writes the text part of a family's pipeline to `folder`, with random weights; returns its models by folder."""
    if family != "hunyuan_video":
        encoder = save_text_encoder(
            folder / "text_encoder", "UMT5EncoderModel" if family == "wan" else "T5EncoderModel"
        )
        save_tokenizer(folder / "tokenizer")
        return {"text_encoder": encoder}
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    clip = transformers.CLIPTextConfig(
        vocab_size=16,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=1,
    )
    models = {"text_encoder": transformers.LlamaModel(llama), "text_encoder_2": transformers.CLIPTextModel(clip)}
    for name, model in models.items():
        model.eval().save_pretrained(folder / name)
        save_tokenizer(folder / name.replace("text_encoder", "tokenizer"))
    return models


def save_image_encoder(folder: Path) -> None:
    """Writes the image encoder and the image processor of an image-to-video pipeline to `folder`."""
    torch.manual_seed(1)
    config = transformers.CLIPVisionConfig(
        hidden_size=12, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    transformers.CLIPVisionModel(config).save_pretrained(folder / "image_encoder")
    size = {"height": 16, "width": 16}
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
    processor.save_pretrained(folder / "image_processor")
