"""One run: all sections together."""

from typing import Literal

from pydantic import Field

from ttv_train.config.dataset import DatasetConfig
from ttv_train.config.encoders import (
    FirstFrameConfig,
    HashTextEncoderConfig,
    TextEncoderConfig,
    VaeConfig,
    WaveletVaeConfig,
)
from ttv_train.config.model import ModelConfig, ObjectiveConfig, SamplingConfig
from ttv_train.config.parallel import ParallelConfig
from ttv_train.config.section import Section
from ttv_train.config.storage import EncodingConfig, LatentsConfig, StorageConfig
from ttv_train.config.training import (
    CheckpointConfig,
    EmaConfig,
    OptimizerConfig,
    TrackingConfig,
    TrainingConfig,
    ValidationConfig,
)


class DeviceConfig(Section):
    """Which accelerator runs the job."""

    backend: Literal["auto", "cuda", "npu", "cpu"] = "auto"
    """`auto` takes CUDA, then Ascend NPU, then CPU: the first one this machine has."""


class RunConfig(Section):
    """One run: from clips to a trained model."""

    output_dir: str = Field("runs/default", min_length=1)
    """Folder of this run: checkpoints, metrics, samples, report. A run writes to it and to `latents.path`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random; together with the data it decides the loss curve, on any number of ranks."""
    device: DeviceConfig = DeviceConfig()
    dataset: DatasetConfig = DatasetConfig()
    vae: VaeConfig = WaveletVaeConfig(kind="wavelet")
    text_encoder: TextEncoderConfig = HashTextEncoderConfig(kind="hash")
    first_frame: FirstFrameConfig = FirstFrameConfig()
    latents: LatentsConfig = LatentsConfig()
    encoding: EncodingConfig = EncodingConfig()
    storage: StorageConfig = StorageConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    sampling: SamplingConfig = SamplingConfig()
    tracking: TrackingConfig = TrackingConfig()
