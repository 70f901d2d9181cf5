"""What a run is: one strict pydantic model per section. `config_file` reads them from YAML."""

from ttv_train.config.dataset import BucketGrid, DatasetConfig, parse_bucket
from ttv_train.config.encoders import (
    DiffusersVaeConfig,
    FirstFrameConfig,
    HashTextEncoderConfig,
    TextEncoderConfig,
    TransformersTextEncoderConfig,
    VaeConfig,
    VaeParallelConfig,
    WaveletVaeConfig,
)
from ttv_train.config.model import ModelConfig, ObjectiveConfig, SamplingConfig
from ttv_train.config.parallel import ParallelConfig, SequenceParallelConfig
from ttv_train.config.run import DeviceConfig, RunConfig
from ttv_train.config.section import Section
from ttv_train.config.storage import EncodingConfig, LatentsConfig, LatentSource, StorageConfig
from ttv_train.config.training import (
    CheckpointConfig,
    EmaConfig,
    OptimizerConfig,
    TrackingConfig,
    TrainingConfig,
    ValidationConfig,
)

__all__ = [
    "BucketGrid",
    "CheckpointConfig",
    "DatasetConfig",
    "DeviceConfig",
    "DiffusersVaeConfig",
    "EmaConfig",
    "EncodingConfig",
    "FirstFrameConfig",
    "HashTextEncoderConfig",
    "LatentSource",
    "LatentsConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "SequenceParallelConfig",
    "StorageConfig",
    "TextEncoderConfig",
    "TrackingConfig",
    "TrainingConfig",
    "TransformersTextEncoderConfig",
    "VaeConfig",
    "VaeParallelConfig",
    "ValidationConfig",
    "WaveletVaeConfig",
    "parse_bucket",
]
