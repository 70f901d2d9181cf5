"""Each family's captions are embedded as its pipeline embeds them, on tiny random weights."""

from dataclasses import replace

import pytest
import torch
import transformers
from diffusers import CogVideoXPipeline, HunyuanVideoPipeline, LTXPipeline, WanPipeline

from tests.unit.encoders.tiny_models import save_text_encoder, save_text_pipeline
from ttv_train.config import TransformersTextEncoderConfig, WaveletVaeConfig
from ttv_train.config_file import parse_config
from ttv_train.data.collate import pad_prompts
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.encoders.text import build_text_encoder, max_text_tokens
from ttv_train.encoders.text.recipes import RECIPES, clean
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.parallel.mesh import ParallelMesh

pytest.importorskip("ftfy")
pytest.importorskip("bs4")

CPU = torch.device("cpu")
CAPTIONS = ["the  rabbit &amp;amp; a dog\n wakes ", " ".join(["dog", "rabbit", "floor"] * 200), ""]
"""A short one that cleaning changes, one beyond every maximum length, and none."""


def config(folder, recipe, **settings):
    return TransformersTextEncoderConfig(
        kind="transformers", path=str(folder), recipe=recipe, dtype="float32", **settings
    )


def encoder(folder, recipe, **settings):
    return build_text_encoder(config(folder, recipe, **settings), CPU)


def tokenizer(folder, name="tokenizer"):
    return transformers.AutoTokenizer.from_pretrained(folder / name)


def cogvideox(folder, models):
    pipeline = CogVideoXPipeline(tokenizer(folder), models["text_encoder"], None, None, None)
    embeds, _ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False, device=CPU)
    return embeds, None


def wan(folder, models):
    pipeline = WanPipeline(tokenizer(folder), models["text_encoder"], None, None)
    embeds, _ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False, max_sequence_length=512, device=CPU)
    return embeds, None


def hunyuan_video(folder, models):
    """With the pooled embedding as the first row."""
    pipeline = HunyuanVideoPipeline(
        models["text_encoder"],
        tokenizer(folder),
        None,
        None,
        None,
        models["text_encoder_2"],
        tokenizer(folder, "tokenizer_2"),
    )
    embeds, pooled, mask = pipeline.encode_prompt(CAPTIONS, device=CPU)
    pooled = torch.nn.functional.pad(pooled, (0, embeds.shape[-1] - pooled.shape[-1]))
    return torch.cat([pooled[:, None], embeds], 1), torch.cat([mask.new_ones(len(mask), 1), mask], 1).bool()


def ltx_video(folder, models):
    pipeline = LTXPipeline(None, None, models["text_encoder"], tokenizer(folder), None)
    embeds, mask, _, _ = pipeline.encode_prompt(CAPTIONS, do_classifier_free_guidance=False, device=CPU)
    return embeds, mask


def stdit3(folder, models):
    """Open-Sora has no pipeline of diffusers: its encoder is called on the cleaned captions with their mask."""
    cleaned = ["the rabbit & a dog wakes", *CAPTIONS[1:]]
    tokens = tokenizer(folder)(cleaned, padding="max_length", max_length=300, truncation=True, return_tensors="pt")
    return models["text_encoder"](**tokens).last_hidden_state, tokens["attention_mask"].bool()


PIPELINES = {
    "cogvideox": cogvideox,
    "stdit3": stdit3,
    "wan": wan,
    "hunyuan_video": hunyuan_video,
    "ltx_video": ltx_video,
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_embeddings_and_masks_are_those_of_the_pipeline(family, tmp_path):
    models = save_text_pipeline(tmp_path, family)
    expected, expected_mask = PIPELINES[family](tmp_path, models)
    ours = encoder(tmp_path, family)
    embeds, mask = ours.encode(CAPTIONS)
    torch.testing.assert_close(embeds, expected, atol=1e-6, rtol=0)
    if expected_mask is not None:
        assert torch.equal(mask, expected_mask)
    assert embeds.shape[1:] == (ours.max_length, ours.hidden_size)
    assert ours.max_length == max_text_tokens(config(tmp_path, family)) == RECIPES[family].num_rows
    assert mask.sum(1).tolist()[1] == ours.max_length
    assert mask.sum(1).min() >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stored_and_padded_again_is_what_the_model_was_to_get(family, tmp_path):
    """Bit for bit, but for padding that the family masks, which comes back as zeros."""
    save_text_pipeline(tmp_path, family)
    ours = encoder(tmp_path, family)
    # Each caption is embedded alone, so that its embedding does not depend on those of other clips.
    embeds, mask = (torch.cat(rows) for rows in zip(*(ours.encode([caption]) for caption in CAPTIONS), strict=True))
    clips = ClipEncoder(WaveletVaeConfig(kind="wavelet", channels=4), config(tmp_path, family), CPU)
    videos = [torch.zeros(2, 16, 16, 3, dtype=torch.uint8)] * 3
    stored = [(clip.prompt_embeds, clip.prompt_mask) for clip in clips.encode(videos, CAPTIONS)]
    if family != "cogvideox":
        assert [len(prompt) for prompt, _ in stored] == mask.sum(1).tolist()
        assert len(clips.encode_null_prompt()[0]) == mask[2].sum()
    padded, padded_mask = pad_prompts(stored, max_text_tokens(config(tmp_path, family)))
    assert torch.equal(padded_mask, mask)
    if RECIPES[family].padding == "masked":
        embeds = embeds.masked_fill(~mask[..., None], 0)
    assert torch.equal(padded, embeds)


def test_every_family_has_a_recipe_of_its_name_that_fits_how_it_treats_padding():
    assert RECIPES.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        assert family.uses_prompt_mask == (RECIPES[name].padding == "masked")


def test_the_fingerprint_knows_the_recipe(tmp_path, monkeypatch):
    save_text_pipeline(tmp_path, "cogvideox")
    fingerprints = [encoder(tmp_path, recipe).fingerprint for recipe in ("cogvideox", "ltx_video", "stdit3", None)]
    fingerprints.append(encoder(tmp_path, "cogvideox", max_length=9).fingerprint)
    changed = replace(RECIPES["ltx_video"], template="a video of {}")
    monkeypatch.setitem(RECIPES, "ltx_video", changed)
    fingerprints.append(encoder(tmp_path, "ltx_video").fingerprint)
    # Without a recipe T5 is called as CogVideoX calls it.
    assert fingerprints[3] == fingerprints[0]
    assert len(set(fingerprints)) == 5


def test_the_fingerprint_knows_the_second_encoder(tmp_path):
    save_text_pipeline(tmp_path, "hunyuan_video")
    before = encoder(tmp_path, "hunyuan_video").fingerprint
    file = tmp_path / "tokenizer_2" / "tokenizer.json"
    file.write_text(file.read_text().replace("rabbit", "hare"))
    assert encoder(tmp_path, "hunyuan_video").fingerprint != before


def test_captions_are_cleaned_as_published_models_had_them():
    caption = 'The "Rabbit" wakes, see www.example.com #1234567 (photo.jpg) <b>now</b>'
    assert clean(caption, RECIPES["stdit3"]) == 'the "rabbit" wakes, see now'
    assert clean(" Caf\u00c3\u00a9 &amp;lt;b&gt;\t\nx ", RECIPES["wan"]) == "Caf\u00e9 <b> x"
    for family in ("cogvideox", "hunyuan_video", "ltx_video"):
        assert clean(" As  it is\n", RECIPES[family]) == " As  it is\n"


def test_a_missing_package_is_named_before_captions_are_cleaned_by_halves(monkeypatch):
    monkeypatch.setattr("ttv_train.encoders.text.recipes.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ftfy.*pip install 'ttv-train\[captions\]'"):
        clean("a dog", RECIPES["wan"])
    assert clean("a dog", RECIPES["ltx_video"]) == "a dog"


def test_an_encoder_of_another_family_is_refused(tmp_path):
    save_text_pipeline(tmp_path, "cogvideox")
    with pytest.raises(UserError, match="T5EncoderModel, but recipe wan takes a UMT5EncoderModel"):
        encoder(tmp_path, "wan")
    save_text_pipeline(tmp_path / "hunyuan", "hunyuan_video")
    with pytest.raises(UserError, match=r"LlamaModel needs a text_encoder.recipe"):
        encoder(tmp_path / "hunyuan", None)
    with pytest.raises(UserError, match="has two text encoders; give the folder of the pipeline"):
        encoder(tmp_path / "hunyuan/text_encoder", "hunyuan_video", tokenizer_path=str(tmp_path / "tokenizer"))
    save_text_encoder(tmp_path / "hunyuan/text_encoder_2")
    with pytest.raises(UserError, match="pools with a CLIPTextModel"):
        encoder(tmp_path / "hunyuan", "hunyuan_video")


def test_a_recipe_of_another_family_is_refused_before_the_model_is_built():
    run = parse_config(
        {
            "model": {"family": "wan"},
            "text_encoder": {"kind": "transformers", "path": "models/LTX", "recipe": "ltx_video"},
        }
    )
    mesh = ParallelMesh.__new__(ParallelMesh)
    with pytest.raises(UserError, match=r"recipe ltx_video is not that of model.family wan; set it to wan"):
        build_model(run, mesh, latent_channels=4, text_hidden_size=8, compute_dtype=torch.float32)
