"""One training run, top to bottom: build the parts, then the loop."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from ttv_train import sample
from ttv_train.checkpoint.load import latest_verified, load_checkpoint
from ttv_train.checkpoint.lock import lock_run_folder
from ttv_train.checkpoint.save import save_checkpoint
from ttv_train.config import RunConfig, micro_batches, save_config
from ttv_train.data.collate import Collator
from ttv_train.data.loader import LatentLoader
from ttv_train.data.order import DataOrder
from ttv_train.data.quarantine import Quarantine, QuarantineRow
from ttv_train.data.shards import LatentEntry, LatentStore
from ttv_train.data.synthetic import SyntheticStore
from ttv_train.devices import get_backend
from ttv_train.diffusion import build_objective
from ttv_train.ema import Ema
from ttv_train.encoders import encoder_fingerprint
from ttv_train.encoders.vae import build_vae
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_sharded_model
from ttv_train.monitor.metrics import MetricsLog
from ttv_train.monitor.progress import TrainingProgress
from ttv_train.monitor.step_timer import StepTimer
from ttv_train.monitor.summary import write_summary
from ttv_train.parallel import collectives
from ttv_train.parallel.mesh import ParallelMesh, build_mesh, distributed, main_rank_first_error
from ttv_train.report import write_report
from ttv_train.step import TrainStep
from ttv_train.validate import split_holdout, validation_batches, validation_loss
