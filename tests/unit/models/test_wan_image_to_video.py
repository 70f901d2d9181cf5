"""Image-to-video Wan against diffusers' pipeline: what the encoders make of a first frame, and what is sampled from it.

Version 2.1 takes latents and image embeddings of the frame; 2.2 takes latents only, and is two experts.
"""

import pytest
import torch
import transformers
from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.unit.encoders.tiny_models import save_image_encoder, save_text_encoder, save_vae
from tests.unit.models.comparison import TEXT_WIDTH
from ttv_train.config import (
    DiffusersVaeConfig,
    FirstFrameConfig,
    HashTextEncoderConfig,
    ModelConfig,
    ObjectiveConfig,
    SamplingConfig,
)
from ttv_train.config_file import parse_config
from ttv_train.data.collate import normalized_first_frames
from ttv_train.diffusion import build_objective
from ttv_train.diffusion.first_frame import FirstFrame
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.encoders.first_frame import FirstFrameEncoder
from ttv_train.errors import UserError
from ttv_train.generate import generate_latents
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.models.experts import OtherExpert
from ttv_train.parallel.rng import keyed_normal
from ttv_train.parallel.sequence.none import NoSequenceParallel

CPU = torch.device("cpu")
FAMILY = FAMILIES["wan"]
BUCKET, LATENT_SHAPE = (9, 48, 64), (16, 3, 6, 8)
IMAGE_WIDTH, IMAGE_CHANNELS = 12, 2 * 16 + 4
SMALL = {"num_attention_heads": 3, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 16}
VERSION_2_2 = SMALL | {"in_channels": IMAGE_CHANNELS}
VERSION_2_1 = VERSION_2_2 | {"image_dim": IMAGE_WIDTH, "added_kv_proj_dim": 36}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline's VAE, image encoder and image processor."""
    folder = tmp_path_factory.mktemp("pipeline")
    save_vae(folder / "vae", "AutoencoderKLWan")
    save_image_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def video():
    return torch.randint(0, 256, (*BUCKET, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


def build(config, seed=0):
    torch.manual_seed(seed)
    settings = ModelConfig(family="wan", config=config)
    model = FAMILY.build(settings, latent_channels=16, text_hidden_size=TEXT_WIDTH).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def clip_encoder(folder, embeds: bool):
    return ClipEncoder(
        DiffusersVaeConfig(kind="diffusers", path=str(folder / "vae"), dtype="float32"),
        HashTextEncoderConfig(kind="hash", hidden_size=TEXT_WIDTH),
        CPU,
        FirstFrameConfig(enabled=True, image_encoder_path=str(folder) if embeds else None),
    )


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_sampling_from_a_first_frame_equals_the_pipeline(folder, video, version):
    model = build(VERSION_2_1 if version == "2.1" else VERSION_2_2)
    low = build(VERSION_2_2, seed=1) if version == "2.2" else None
    objective = build_objective(ObjectiveConfig(kind="flow_matching"), FAMILY)
    sampling = SamplingConfig(num_steps=4, guidance_scale=5.0)
    # Image-to-video 2.1 counts on 512 text tokens.
    prompt, null = keyed_normal((2, 1, 512, TEXT_WIDTH), "text")
    noise = keyed_normal(LATENT_SHAPE, sampling.seed, "sampling noise", "key")[None]
    encoder = clip_encoder(folder, embeds=version == "2.1")

    pipeline = WanImageToVideoPipeline(
        None,
        None,
        encoder.vae._model,
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        transformers.CLIPImageProcessor.from_pretrained(folder / "image_processor"),
        transformers.CLIPVisionModel.from_pretrained(folder / "image_encoder"),
        model,
        low,
        boundary_ratio=None if low is None else 0.9,
    )
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        Image.fromarray(video[0].numpy()),
        prompt_embeds=prompt,
        negative_prompt_embeds=null,
        height=BUCKET[1],
        width=BUCKET[2],
        num_frames=BUCKET[0],
        num_inference_steps=sampling.num_steps,
        guidance_scale=sampling.guidance_scale,
        latents=noise,
        output_type="latent",
    ).frames

    for transformer in (model, low):
        if transformer is not None:
            FAMILY.install_attention(transformer, NoSequenceParallel())
    (clip,) = encoder.encode([video], ["a dog"])
    first_frame = normalized_first_frames([clip.first_frame], encoder.vae.normalization)

    def sample(first_frame):
        return generate_latents(
            model,
            FAMILY,
            objective,
            LATENT_SHAPE,
            prompt,
            torch.ones(1, 512, dtype=torch.bool),
            (null[0], torch.ones(512, dtype=torch.bool)),
            bucket=BUCKET,
            fps=16.0,
            sampling=sampling,
            sample_keys=["key"],
            sequence=NoSequenceParallel(),
            other_expert=None if low is None else OtherExpert(low, (0.9, 1.0), sampling.guidance_scale),
            first_frame=first_frame,
        )

    latents = sample(first_frame)
    assert latents.abs().max() > 0.1
    torch.testing.assert_close(latents, expected, atol=1e-4, rtol=0)
    (other,) = encoder.encode([255 - video], ["a dog"])
    assert not torch.allclose(sample(normalized_first_frames([other.first_frame], encoder.vae.normalization)), latents)


def test_only_the_first_frame_is_encoded(folder, video):
    changed = video.clone()
    changed[1:] = 0
    encoder = clip_encoder(folder, embeds=True)
    first, second = (clip.first_frame for clip in encoder.encode([video, changed], ["a", "a"]))
    torch.testing.assert_close(first.latents, second.latents)
    torch.testing.assert_close(first.embeds, second.embeds)
    assert first.embeds.shape == encoder._first_frame_encoder.embeds_shape == (5, IMAGE_WIDTH)
    assert first.latents.shape == LATENT_SHAPE


def test_the_fingerprint_knows_what_is_encoded_of_the_frame(folder):
    plain = ClipEncoder(
        DiffusersVaeConfig(kind="diffusers", path=str(folder / "vae"), dtype="float32"),
        HashTextEncoderConfig(kind="hash"),
        CPU,
    )
    fingerprints = [plain.visual_fingerprint]
    fingerprints += [clip_encoder(folder, embeds).visual_fingerprint for embeds in (False, True)]
    assert fingerprints[0] == plain.vae.fingerprint
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMALL | {"in_channels": 20}, "in_channels is 20, but latents of this vae make it 16 for text to video or 36"),
        (SMALL | {"image_dim": 8}, "image_dim 8 needs added_kv_proj_dim and in_channels 36"),
        (VERSION_2_1 | {"pos_embed_seq_len": 10}, "first and last frames"),
    ],
)
def test_wrong_configs_are_named(config, message):
    with pytest.raises(UserError, match=message):
        build(config)


@pytest.mark.parametrize(
    ("config", "first_frame", "message"),
    [
        (VERSION_2_2, {}, "first_frame.enabled is false; set it to true"),
        (VERSION_2_1, {"enabled": True}, "first_frame.image_encoder_path is not set"),
    ],
)
def test_datasets_without_what_the_model_takes_are_refused(config, first_frame, message):
    run = parse_config({"model": {"family": "wan", "config": config}, "first_frame": first_frame})
    with pytest.raises(UserError, match=message):
        build_model(run, None, latent_channels=16, text_hidden_size=TEXT_WIDTH, compute_dtype=torch.float32)


def test_captions_of_another_length_are_refused_where_text_is_told_from_image_by_it():
    model = build(VERSION_2_1)
    latents = torch.zeros(1, *LATENT_SHAPE)
    first_frame = FirstFrame(latents, torch.zeros(1, 5, IMAGE_WIDTH))
    with pytest.raises(UserError, match=r"text_encoder.max_length 5.*512 text tokens"):
        FAMILY.predict(
            model,
            latents,
            torch.tensor([1.0]),
            torch.zeros(1, 5, TEXT_WIDTH),
            torch.ones(1, 5, dtype=torch.bool),
            fps=torch.tensor([16.0]),
            height=48,
            width=64,
            first_frame=first_frame,
        )


def test_what_is_not_a_pipeline_with_an_image_encoder_is_refused(tmp_path):
    with pytest.raises(UserError, match="image_encoder_path models needs enabled: true"):
        parse_config({"first_frame": {"image_encoder_path": "models"}})
    save_text_encoder(tmp_path / "image_encoder")
    config = FirstFrameConfig(enabled=True, image_encoder_path=str(tmp_path))
    with pytest.raises(UserError, match="its image_encoder is a T5EncoderModel, not a CLIPVisionModel"):
        FirstFrameEncoder(config, CPU)


def test_an_image_encoder_that_lacks_a_weight_is_refused(tmp_path):
    save_image_encoder(tmp_path)
    file = tmp_path / "image_encoder/model.safetensors"
    weights = load_file(file)
    lost = next(name for name in weights if name.endswith("layers.0.mlp.fc1.bias"))
    save_file({name: weight for name, weight in weights.items() if name != lost}, file, metadata={"format": "pt"})
    encoder = FirstFrameEncoder(FirstFrameConfig(enabled=True, image_encoder_path=str(tmp_path)), CPU)
    with pytest.raises(UserError, match=r"first_frame.image_encoder_path .*: weights lack .*layers.0.mlp.fc1.bias"):
        encoder.embed([torch.zeros(16, 16, 3, dtype=torch.uint8)])
