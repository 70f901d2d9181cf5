"""The optimizer, the length of a run, and what is recorded of it."""

from typing import Literal

from pydantic import Field, field_validator

from ttv_train.config.dataset import check_bucket
from ttv_train.config.section import Fraction, Section


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's denominator offset."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Where `cosine` ends, as a fraction of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""


class EmaConfig(Section):
    """Exponential moving average of the weights, sharded like the model."""

    enabled: bool = True
    """Keep the average; validation and sampling then use it."""
    decay: float = Field(0.9999, ge=0, lt=1)
    """Decay per step, reached by the warm-up min(decay, (1 + step) / (10 + step))."""


class TrainingConfig(Section):
    """Length and batch of the run."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    global_batch_size: int = Field(8, ge=1)
    """Samples per optimizer step over all ranks: the same on any number of ranks."""
    tokens_per_batch: int | None = Field(None, ge=1)
    """Latent positions (frames x height x width of the latents) per optimizer step over all ranks. A bucket's batch is
    then the largest multiple of `global_batch_size` that fits, and at least that. `null` gives every bucket
    `global_batch_size` samples."""
    bucket_batch_sizes: dict[str, int] = {}
    """Samples per optimizer step for some buckets, such as {1x480x720: 64}; they go before `tokens_per_batch`."""
    tail: Literal["repeat", "drop"] = "repeat"
    """A bucket's last, incomplete batch of an epoch: `repeat` fills it up with samples that the epoch has shown before,
    `drop` leaves it out. Both are counted, and every epoch has others."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples per forward pass on one data-parallel rank, at most; the rest is gradient accumulation."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters in forward and backward. Master weights and gradient reduction stay float32."""
    max_skipped_steps: int = Field(10, ge=0)
    """Consecutive non-finite steps that are skipped before the run stops."""

    @field_validator("bucket_batch_sizes")
    @classmethod
    def _bucket_batch_sizes(cls, value: dict[str, int]) -> dict[str, int]:
        for bucket, size in value.items():
            check_bucket(bucket)
            if size < 1:
                raise ValueError(f"the batch size {size} of bucket {bucket} is less than 1")
        return value


class CheckpointConfig(Section):
    """When checkpoints are written and how long they are kept."""

    every_steps: int = Field(500, ge=1)
    """Steps between checkpoints; the last step always writes one."""
    keep_last: int = Field(3, ge=1)
    """Newest checkpoints that are kept."""
    resume: bool = True
    """Go on from the newest checkpoint in `output_dir` that verifies. False refuses a folder that has one."""


class ValidationConfig(Section):
    """Held-out loss and videos during training."""

    every_steps: int = Field(500, ge=1)
    """Steps between validations; step 0 and the last step are always validated."""
    holdout: Literal["none", "videos", "last_clips"] = "videos"
    """Which clips are kept out of training: a fraction of the `videos`; the `last_clips` of videos that gave several;
    or `none`, which validates on the training clips."""
    holdout_fraction: float = Field(0.02, gt=0, lt=1)
    """Fraction of videos held out with `holdout: videos`, at least one."""
    max_clips: int = Field(64, ge=1)
    """Clips whose loss is measured, at most."""
    noise_levels: list[Fraction] = Field([0.1, 0.3, 0.5, 0.7, 0.9], min_length=1)
    """Fixed timesteps of the validation loss, as fractions of the schedule."""
    num_videos: int = Field(0, ge=0)
    """Videos sampled from held-out captions at each validation."""


class TrackingConfig(Section):
    """Where metrics go, besides metrics.jsonl."""

    trackers: list[Literal["tensorboard", "wandb", "aim", "comet_ml", "mlflow", "clearml", "swanlab"]] = ["tensorboard"]
    """Trackers of accelerate."""
    every_steps: int = Field(1, ge=1)
    """Steps between metric records. The others are not timed phase by phase, since that has to wait for the device."""
