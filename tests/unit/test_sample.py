from contextlib import contextmanager
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tests.latent_samples import make_entry
from tests.unit.models.tiny import TINY
from ttv_train import sample
from ttv_train.checkpoint.save import save_checkpoint
from ttv_train.config_file import parse_config
from ttv_train.data.shards import LatentSample
from ttv_train.devices import get_backend
from ttv_train.diffusion import build_objective
from ttv_train.ema import Ema
from ttv_train.encoders.text import build_text_encoder
from ttv_train.encoders.vae import build_vae
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.monitor.samples import read_samples
from ttv_train.parallel.mesh import build_mesh, distributed
from ttv_train.prompts import captions, negative_prompt, stored_prompts

BUCKET = (4, 48, 32)


def run_config(folder):
    return parse_config(
        {
            "output_dir": str(folder),
            "device": {"backend": "cpu"},
            "dataset": {"fps": 8, "buckets": ["4x48x32", "8x48x32"]},
            "vae": {"kind": "wavelet", "spatial_levels": 3, "temporal_levels": 1, "channels": 4},
            "text_encoder": {"kind": "hash", "hidden_size": 8, "max_length": 5},
            "model": {
                "config": {
                    "num_attention_heads": 2,
                    "attention_head_dim": 16,
                    "num_layers": 1,
                    "time_embed_dim": 8,
                    "use_rotary_positional_embeddings": True,
                }
            },
            "training": {"precision": "float32"},
            "sampling": {"num_steps": 2, "guidance_scale": 2.0},
        }
    )


@contextmanager
def built(config):
    """Mesh, model and sequence of a run of one process."""
    with distributed(get_backend("cpu"), 60) as device:
        mesh = build_mesh(config.parallel, device)
        model, sequence = build_model(config, mesh, latent_channels=4, text_hidden_size=8, compute_dtype=torch.float32)
        yield SimpleNamespace(mesh=mesh, model=model, sequence=sequence)


def save(config, step, average=0.0):
    """A checkpoint whose average is `average` times the weights."""
    with built(config) as run:
        ema = Ema(run.model, 0.9)
        for tensor in ema.state_dict().values():
            tensor.mul_(average)
        optimizer = torch.optim.AdamW(run.model.parameters())
        folder = sample.Path(config.output_dir) / "checkpoints"
        return save_checkpoint(folder, step, run.model, optimizer, ema, {"step": step}, keep_last=5)


def frames(path):
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(int)


def test_prompts_become_videos_beside_the_checkpoint_they_come_from(tmp_path):
    config = run_config(tmp_path)
    save(config, 3)
    save(config, 7)
    paths = sample.run(config, prompts=["A dog", "A <b>cat</b>"])
    folder = tmp_path / "samples" / "step-00000007"
    assert paths == [folder / "00-a-dog.mp4", folder / "01-a-b-cat-b.mp4"]
    rows = read_samples(tmp_path)[7]
    assert [(row.prompt, row.source_name, row.reference) for row in rows] == [
        ("A dog", None, None),
        ("A <b>cat</b>", None, None),
    ]
    assert frames(paths[0]).shape == (4, 48, 32, 3)


def test_the_average_is_used_unless_the_weights_are_wanted(tmp_path):
    config = run_config(tmp_path)
    checkpoint = save(config, 3, average=0.0)
    averaged = frames(*sample.run(config, prompts=["A dog"], output=tmp_path / "average"))
    trained = frames(
        *sample.run(config, checkpoint=checkpoint, prompts=["A dog"], use_ema=False, output=tmp_path / "weights")
    )
    assert np.abs(averaged - trained).mean() > 1


def test_guidance_leads_away_from_the_negative_prompt(tmp_path):
    config = run_config(tmp_path)
    save(config, 3, average=1.0)
    negative = parse_config(
        config.model_dump() | {"sampling": {**config.sampling.model_dump(), "negative_prompt": "A"}}
    )
    plain, other = (
        frames(*sample.run(each, prompts=["A dog"], output=tmp_path / name))
        for each, name in ((config, "plain"), (negative, "other"))
    )
    assert np.abs(plain - other).max() > 0
    store = FakeStore(config, ["A dog"])
    embeds, mask = store.text_encoder.encode(["A"])
    found = negative_prompt(negative, (torch.zeros(1, 8), torch.ones(1, dtype=torch.bool)))
    assert torch.equal(found[0], embeds[0])
    assert torch.equal(found[1], mask[0])


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("stdit3", {}, "has an embedding of its own for it"),
        ("hunyuan_video", {"guidance_embeds": True}, "takes the guidance scale as an input"),
    ],
)
def test_a_negative_prompt_that_nothing_would_read_is_refused(tmp_path, family, extra, reason):
    config = run_config(tmp_path).model_dump()
    config["model"] = {"family": family, "config": TINY[family] | extra}
    config["objective"] = {"kind": "flow_matching"}
    save(parse_config(config), 3)
    config["sampling"]["negative_prompt"] = "blurry"
    with pytest.raises(UserError, match=f"negative_prompt 'blurry': the model {reason}; leave it out"):
        sample.run(parse_config(config), prompts=["A dog"])


def test_without_an_intact_checkpoint_nothing_is_sampled(tmp_path):
    config = run_config(tmp_path)
    with pytest.raises(UserError, match="has no checkpoint; train first"):
        sample.run(config, prompts=["A dog"])
    checkpoint = save(config, 3)
    (checkpoint / "trainer.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-00000003 is refused: trainer\.json"):
        sample.run(config, checkpoint=checkpoint, prompts=["A dog"])
    assert not (tmp_path / "samples").exists()


def image_to_video_config(folder):
    config = run_config(folder).model_dump()
    config["model"] = {
        "family": "wan",
        "config": {**TINY["wan"], "in_channels": 2 * 4 + 4},
    }
    config["objective"] = {"kind": "flow_matching"}
    config["first_frame"] = {"enabled": True}
    return parse_config(config)


def test_videos_start_from_images(tmp_path):
    config = image_to_video_config(tmp_path)
    save(config, 3, average=1.0)
    for name, shade in (("dark", 20), ("light", 230)):
        Image.new("RGB", (70, 60), (shade, shade, shade)).save(tmp_path / f"{name}.png")
    images = [tmp_path / "dark.png", tmp_path / "light.png"]
    prompts = ["A dog", "A dog"]
    dark, light = (frames(path) for path in sample.run(config, prompts=prompts, images=images))
    swapped = sample.run(config, prompts=prompts, images=images[::-1], output=tmp_path / "swapped")
    assert dark.shape == light.shape == (4, 48, 32, 3)
    # The noise is that of the prompt; only the image is another one.
    for one, other in zip((dark, light), map(frames, swapped), strict=True):
        assert np.abs(one - other).max() > 0


def test_image_to_video_models_need_an_image_for_each_prompt(tmp_path):
    config = image_to_video_config(tmp_path)
    save(config, 3)
    (tmp_path / "text.png").write_text("not an image")
    for images, message in (
        (None, "give --image FILE for each prompt"),
        ([tmp_path / "text.png"] * 2, "--image is given 2 times and --prompt 1 times"),
        ([tmp_path / "text.png"], "not an image that can be read"),
        ([tmp_path / "missing.png"], "not an image that can be read"),
    ):
        with pytest.raises(UserError, match=message):
            sample.run(config, prompts=["A dog"], images=images)
    with pytest.raises(UserError, match="--image needs a --prompt for each image"):
        sample.run(config, images=[tmp_path / "text.png"])
    text_to_video = run_config(tmp_path)
    with pytest.raises(UserError, match="--image needs an image-to-video model"):
        sample.run(text_to_video, prompts=["A dog"], images=[tmp_path / "text.png"])


class FakeStore:
    """Clips of two captions, encoded with the run's own encoders."""

    path = "latents"

    def __init__(self, config, captions):
        self.vae = build_vae(config.vae, torch.device("cpu"))
        self.text_encoder = build_text_encoder(config.text_encoder, torch.device("cpu"))
        self.entries = [self.entry(i, caption) for i, caption in enumerate(captions)]

    def entry(self, index, caption):
        fields = {"key": f"key/{index}", "caption": caption, "fps": 12.0, "latent_shape": (4, 2, 6, 4)}
        return make_entry(index, BUCKET, num_text_tokens=2, **fields)

    def read(self, entry):
        shade = torch.full((1, 3, *BUCKET), 0.5 if entry.key == "key/0" else -0.5)
        embeds, mask = self.text_encoder.encode([entry.caption])
        return LatentSample(entry, self.vae.encode(shade).mean[0], None, embeds[0], mask[0])


def test_captions_are_sampled_beside_their_clips(tmp_path):
    config = run_config(tmp_path)
    store = FakeStore(config, ["A dog", "A cat", "A dog"])
    entries = captions(store)
    assert [entry.key for entry in entries] == ["key/0", "key/1"]
    embeds, mask = store.text_encoder.encode([""])
    family = FAMILIES["cogvideox"]
    with built(config) as run:
        sampler = sample.Sampler(
            model=run.model,
            family=family,
            objective=build_objective(config.objective, family),
            sequence=run.sequence,
            mesh=run.mesh,
            vae=store.vae,
            null_prompt=(embeds[0], mask[0]),
            max_text_tokens=5,
            compute_dtype=torch.float32,
            config=config.sampling,
        )
        prompts = stored_prompts(store, entries)
        for step in (0, 100):
            folder = sample.step_folder(tmp_path, step)
            assert len(sampler.write_videos(prompts, tmp_path, folder)) == 2
    samples = read_samples(tmp_path)
    assert list(samples) == [0, 100]
    for rows in samples.values():
        assert [(row.key, row.source_name, row.reference) for row in rows] == [
            ("key/0", "0.mp4", "references/key-0.mp4"),
            ("key/1", "1.mp4", "references/key-1.mp4"),
        ]
    for name, shade in (("key-0", 0.5), ("key-1", -0.5)):
        clip = frames(tmp_path / "references" / f"{name}.mp4")
        assert clip.shape == (*BUCKET, 3)
        assert np.abs(clip - (shade + 1) * 127.5).max() <= 3
