"""The model, what it learns to predict and how it is sampled."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ttv_train.config.section import Section


class ModelConfig(Section):
    """The video diffusion transformer."""

    family: Literal["cogvideox", "stdit3", "wan", "hunyuan_video", "ltx_video"] = "cogvideox"
    """Model family, which decides the class, the token layout and the sequence plan."""
    path: str | None = None
    """Local folder or hub id to start from, in the layout of diffusers or as the family publishes it; `null` builds a
    new model from `config`."""
    config: dict[str, Any] = {}
    """Constructor arguments of the family's class, for a new model (unknown keys are errors)."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if self.path is not None and self.config:
            raise ValueError("give either path (start from weights) or config (a new model), not both")
        return self


class ObjectiveConfig(Section):
    """What the model learns to predict."""

    kind: Literal["velocity", "flow_matching"] = "velocity"
    """`velocity` is v-prediction on a discrete schedule, as CogVideoX trains; `flow_matching` is rectified flow."""
    snr_shift_scale: float = Field(1.0, gt=0)
    """CogVideoX's signal-to-noise shift of the `velocity` schedule: 3.0 for 2B, 1.0 for 5B and 1.5."""
    timestep_shift: float | None = Field(None, gt=0)
    """Shift s of `flow_matching`: sigma = s u / (1 + (s - 1) u). `null` takes the family's own, which for some depends
    on the size and length of the clip."""
    timestep_sampling: Literal["uniform", "logit_normal"] | None = None
    """Distribution of `flow_matching` timesteps in training, before the shift; `null` takes the family's own."""
    sigma_range: tuple[float, float] = (0.0, 1.0)
    """Noise levels that `flow_matching` trains, of 0 to 1. Wan 2.2 14B is two models: [0.875, 1] and [0, 0.875]."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Probability that a caption is replaced by the empty prompt, for classifier-free guidance."""

    @field_validator("sigma_range")
    @classmethod
    def _sigma_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] < value[1] <= 1:
            raise ValueError(f"sigma_range {list(value)} must rise within [0, 1]")
        return value


class SamplingConfig(Section):
    """How videos are sampled, in validation and by `ttv-train sample`."""

    num_steps: int = Field(50, ge=1)
    """Solver steps."""
    solver: Literal["ddim", "dpm", "euler", "unipc"] | None = None
    """One that fits the objective and the family; `null` takes the family's own."""
    guidance_scale: float = Field(6.0, ge=1)
    """Classifier-free guidance; 1 switches it off."""
    negative_prompt: str = ""
    """What guidance leads away from, in words; the empty prompt by default, as in training. Not for models that have an
    embedding of their own for it (STDiT3) or take the scale as an input (HunyuanVideo)."""
    other_expert_path: str | None = None
    """Transformer for the noise levels outside `objective.sigma_range`, given like `model.path`: Wan 2.2 14B is two
    models, of which a run trains one. `ttv-train export` makes such a folder of another run."""
    other_expert_guidance_scale: float | None = Field(None, ge=1)
    """Guidance of the other expert; `null` means `guidance_scale`."""
    seed: int = Field(0, ge=0)
    """Seed of the initial noise."""

    @model_validator(mode="after")
    def _guidance_has_an_expert(self) -> "SamplingConfig":
        if self.other_expert_guidance_scale is not None and self.other_expert_path is None:
            raise ValueError(
                f"other_expert_guidance_scale {self.other_expert_guidance_scale} needs other_expert_path: set it, or "
                "leave both out"
            )
        return self
