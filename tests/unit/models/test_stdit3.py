"""STDiT3 against the reference cases, and its adapter."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ttv_train.config import ModelConfig, ObjectiveConfig
from ttv_train.diffusion import build_objective
from ttv_train.diffusion.solvers import sample
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES

FAMILY = FAMILIES["stdit3"]
GOLDEN = Path(__file__).parents[2] / "golden"
CASES = ("image", "video", "odd", "masked")


@pytest.fixture(scope="module")
def reference():
    """Every tensor of the reference file by name, and its metadata."""
    with safe_open(GOLDEN / "stdit3.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture
def model(reference):
    tensors, metadata = reference
    config = ModelConfig(family="stdit3", config=json.loads(metadata["config"]))
    model = FAMILY.build(config, latent_channels=4, text_hidden_size=32)
    weights = {name.removeprefix("sd."): tensor for name, tensor in tensors.items() if name.startswith("sd.")}
    model.load_state_dict(weights, strict=True)
    return model


def small_config(**changes) -> dict:
    return {
        "hidden_size": 16,
        "depth": 1,
        "num_heads": 2,
        "in_channels": 4,
        "caption_channels": 6,
        "model_max_length": 5,
        "input_sq_size": 32,
        **changes,
    }


def build(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(family="stdit3", config=small_config(**changes))
    return FAMILY.build(config, latent_channels=4, text_hidden_size=6)


class TestReference:
    @staticmethod
    def run(model, tensors, case):
        """Output and latents of a case; their gradient is that of the mean square of the output."""
        get = lambda name: tensors.get(f"{case}.{name}")  # noqa: E731
        latents = get("x").clone().requires_grad_()
        out = model(
            latents,
            get("timestep"),
            get("y"),
            get("mask"),
            x_mask=get("x_mask"),
            fps=get("fps"),
            height=get("height"),
            width=get("width"),
        )
        out.square().mean().backward()
        return out, latents

    @pytest.mark.parametrize("case", CASES)
    def test_output_and_input_gradient(self, model, reference, case):
        tensors, _ = reference
        out, latents = self.run(model, tensors, case)
        torch.testing.assert_close(out, tensors[f"{case}.out"], atol=1e-5, rtol=0)
        expected = tensors[f"{case}.grad_x"]
        torch.testing.assert_close(latents.grad, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)

    @pytest.mark.parametrize("case", CASES)
    def test_gradient_norm_of_every_parameter(self, model, reference, case):
        tensors, metadata = reference
        self.run(model, tensors, case)
        expected = json.loads(metadata["grad_norms"])[case]
        norms = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
        assert norms == pytest.approx(expected, rel=1e-4, abs=1e-7)

    def test_adapter_predicts_noise_minus_latents(self, model, reference):
        tensors, _ = reference
        prediction = FAMILY.predict(
            model,
            tensors["video.x"],
            tensors["video.timestep"],
            tensors["video.y"].squeeze(1),
            tensors["video.mask"].bool(),
            fps=tensors["video.fps"],
            height=int(tensors["video.height"][0]),
            width=int(tensors["video.width"][0]),
        )
        torch.testing.assert_close(prediction, -tensors["video.out"][:, :4], atol=1e-5, rtol=0)


class TestSemantics:
    """What the reference cases leave open, as properties that hold exactly."""

    @staticmethod
    def arguments(num_frames=3, size=(6, 8)):
        torch.manual_seed(1)
        return {
            "x": torch.randn(2, 4, num_frames, *size),
            "timestep": torch.tensor([10.0, 700.0]),
            "y": torch.randn(2, 1, 5, 6),
            "mask": torch.ones(2, 5),
            "fps": torch.tensor([8.0, 24.0]),
            "height": torch.tensor([48.0, 48.0]),
            "width": torch.tensor([64.0, 64.0]),
        }

    @staticmethod
    def randomized(**changes):
        model = build(**changes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()

    def test_masked_text_is_not_there(self):
        model, arguments = self.randomized(), self.arguments()
        arguments["mask"] = torch.tensor([[1, 0, 1, 1, 0]] * 2)
        out = model(**arguments)
        arguments["y"] = arguments["y"][:, :, [0, 2, 3]]
        torch.testing.assert_close(model(**{**arguments, "mask": None}), out)
        other = {**arguments, "mask": torch.tensor([[1, 1, 0]] * 2)}
        assert not torch.allclose(model(**other), out, atol=1e-4)

    def test_dropped_captions_become_the_learned_one(self):
        model, arguments = self.randomized(), self.arguments()
        dropped = model(**arguments, drop_ids=torch.tensor([True, False]))
        arguments["y"][0] = FAMILY.null_prompt(model)
        assert torch.equal(dropped, model(**arguments))

    def test_frames_that_are_all_noisy_need_no_mask(self):
        model, arguments = self.randomized(), self.arguments()
        masked = model(**arguments, x_mask=torch.ones(2, 3, dtype=torch.bool))
        torch.testing.assert_close(masked, model(**arguments))

    @pytest.mark.parametrize("name", ["fps", "height", "timestep"])
    def test_every_condition_matters(self, name):
        model, arguments = self.randomized(), self.arguments()
        out = model(**arguments)
        arguments[name] = arguments[name] * 1.5
        assert not torch.allclose(model(**arguments), out, atol=1e-4)

    def test_padding_to_whole_patches_is_by_zeros_and_cropped(self):
        model, arguments = self.randomized(patch_size=(2, 2, 2)), self.arguments(num_frames=3, size=(5, 7))
        out = model(**arguments)
        assert out.shape == (2, 8, 3, 5, 7)
        arguments["x"] = torch.nn.functional.pad(arguments["x"], (0, 1, 0, 1, 0, 1))
        torch.testing.assert_close(model(**arguments)[:, :, :3, :5, :7], out)

    def test_without_qk_norm_and_sigma(self):
        model = self.randomized(qk_norm=False, pred_sigma=False)
        assert "spatial_blocks.0.attn.q_norm.weight" not in model.state_dict()
        assert model(**self.arguments()).shape == (2, 4, 3, 6, 8)

    def test_new_temporal_blocks_and_frame_rates_have_no_effect(self):
        model, arguments = build(), self.arguments()
        out = model(**arguments)
        arguments["fps"] = arguments["fps"] * 2
        arguments["x"][:, :, 2] = 0
        assert torch.equal(model(**arguments)[:, :, :2], out[:, :, :2])

    def test_bfloat16_returns_float32(self):
        model, arguments = self.randomized().bfloat16(), self.arguments()
        arguments["x"] = arguments["x"].bfloat16()
        out = model(**arguments)
        assert out.dtype == torch.float32
        assert out.isfinite().all()


def test_timestep_shift_is_the_reference_transform():
    objective = build_objective(ObjectiveConfig(kind="flow_matching", timestep_sampling="uniform"), FAMILY)
    for row in json.loads((GOLDEN / "rflow_timestep_transform.json").read_text())["rows"]:
        uniform = torch.tensor([1 - row["t"] / 1000], dtype=torch.float64)
        shifted = objective.timesteps(uniform, (row["num_frames"], row["height"], row["width"]))
        assert shifted.item() == pytest.approx(row["shifted"], rel=1e-6)


def test_short_clips_are_shifted_as_one_latent_frame():
    assert FAMILY.flow_schedule.shift((9, 512, 512)) == 1.0


def test_sampling_takes_euler_steps_along_the_shifted_timesteps():
    """z moves by (x_0 - noise) dt between transformed timesteps 1000 (1 - i / n), as Open-Sora samples."""
    objective = build_objective(ObjectiveConfig(kind="flow_matching"), FAMILY)
    model, bucket = TestSemantics.randomized(), (17, 48, 64)
    prompt, noise = torch.randn(1, 5, 6), torch.randn(1, 4, 5, 6, 8)
    mask, fps = torch.ones(1, 5, dtype=torch.bool), torch.tensor([24.0])

    def denoise(latents, timesteps):
        return FAMILY.predict(model, latents, timesteps, prompt, mask, fps=fps, height=48, width=64)

    size = {"height": torch.tensor([48.0]), "width": torch.tensor([64.0])}
    shift = (48 * 64 / 512**2) ** 0.5 * 5**0.5
    plain = [1 - i / 3 for i in range(3)]
    timesteps = [1000 * shift * t / (1 + (shift - 1) * t) for t in plain] + [0.0]
    z = noise
    with torch.no_grad():
        for now, later in pairwise(timesteps):
            velocity = model(z, torch.tensor([now]), prompt[:, None], mask, fps=fps, **size)[:, :4]
            z = z + velocity * (now - later) / 1000
    torch.testing.assert_close(sample(denoise, objective, noise, 3, bucket=bucket), z, atol=1e-4, rtol=0)


def test_adapter_describes_the_model():
    model = build(depth=2)
    assert FAMILY.blocks(model) == [
        model.spatial_blocks[0],
        model.temporal_blocks[0],
        model.spatial_blocks[1],
        model.temporal_blocks[1],
    ]
    assert FAMILY.token_grid(model, (4, 3, 7, 9)) == (3, 4, 5)
    assert FAMILY.num_attention_heads(model) == 2
    with pytest.raises(UserError, match="3 channels"):
        FAMILY.check_latents(model, (3, 3, 6, 8))
    for path in (*FAMILY.sequence_plan.shard, *FAMILY.sequence_plan.join):
        model.get_submodule(path)


class TestLoading:
    @staticmethod
    def publish(folder, **config):
        model = build()
        save_file(model.state_dict(), folder / "model.safetensors")
        published = {"model_type": "STDiT3", "class_dropout_prob": 0.1, "drop_path": 0.0, **small_config(), **config}
        (folder / "config.json").write_text(json.dumps(published))
        return model

    @staticmethod
    def load(folder, channels=4):
        return FAMILY.build(
            ModelConfig(family="stdit3", path=str(folder)), latent_channels=channels, text_hidden_size=6
        )

    def test_published_layout(self, tmp_path):
        model = self.publish(tmp_path)
        for name, tensor in self.load(tmp_path).state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        with pytest.raises(UserError, match="in_channels is 4, but the encoders give 8"):
            self.load(tmp_path, channels=8)

    def test_layout_of_diffusers(self, tmp_path):
        model = build()
        model.save_pretrained(tmp_path)
        for name, tensor in self.load(tmp_path).state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name

    @pytest.mark.parametrize(
        ("config", "message"),
        [({"drop_path": 0.1}, "drop_path"), ({"depth": 2}, r"spatial_blocks\.1"), ({"num_layers": 2}, "num_layers")],
    )
    def test_what_does_not_fit_is_named(self, tmp_path, config, message):
        self.publish(tmp_path, **config)
        with pytest.raises(UserError, match=message):
            self.load(tmp_path)

    def test_wrong_configs_are_named(self):
        with pytest.raises(UserError, match="unknown key dept; did you mean depth"):
            build(dept=3)
        with pytest.raises(UserError, match="hidden_size 18 must be a multiple"):
            build(hidden_size=18)
