"""One training run, top to bottom: build the parts, then the loop."""

import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ttv_train.checkpoint.load import latest_verified, load_checkpoint
from ttv_train.checkpoint.lock import lock_run_folder
from ttv_train.checkpoint.save import save_checkpoint
from ttv_train.config import RunConfig
from ttv_train.config_file import save_config
from ttv_train.data.agreed import AgreedBatches
from ttv_train.data.collate import Batch, Collator
from ttv_train.data.loader import LatentLoader
from ttv_train.data.mixing import MixedDataset
from ttv_train.data.quarantine import Quarantine, QuarantineRow
from ttv_train.data.shards import LatentEntry
from ttv_train.data.training_order import dataset_digest, training_order
from ttv_train.devices import get_backend
from ttv_train.devices.base import DeviceBackend
from ttv_train.diffusion import build_objective
from ttv_train.ema import Ema
from ttv_train.encoders.text import max_text_tokens
from ttv_train.encoders.vae import build_vae
from ttv_train.errors import UserError
from ttv_train.models import FAMILIES
from ttv_train.models.build import build_model
from ttv_train.monitor.environment import write_environment
from ttv_train.monitor.metrics import MetricsLog
from ttv_train.monitor.progress import TrainingProgress
from ttv_train.monitor.samples import step_folder
from ttv_train.monitor.step_timer import StepTimer
from ttv_train.monitor.summary import describe, write_summary
from ttv_train.parallel import collectives
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank
from ttv_train.parallel.encoder_ranks import split_job
from ttv_train.parallel.mesh import ParallelMesh, build_mesh
from ttv_train.prompts import negative_prompt, stored_prompts
from ttv_train.report import write_report
from ttv_train.sample import Sampler, build_sampler
from ttv_train.step import StepResult, TrainStep
from ttv_train.storage.counters import counters, difference
from ttv_train.storage.usage import WorkerMetrics, usage
from ttv_train.training_data import encode_for_trainers, null_prompt, open_dataset
from ttv_train.validate import read_holdout, split_holdout, validation_batches, validation_loss

logger = logging.getLogger(__name__)


def run(config: RunConfig, *, dry_run: bool = False) -> None:
    """Trains as `config` says, going on from the newest checkpoint in `output_dir` if there is one.

    A dry run builds every part, takes one step and writes nothing; before anything is encoded it trains on random
    latents of the same shapes.

    Raises:
        UserError: on every rank, for anything wrong with the config, the data or the number of ranks.
    """
    backend = get_backend(config.device.backend)
    encoders = (config.latents.encoder_ranks, config.vae.parallel.degree)
    with split_job(backend, config.parallel, *encoders) as part:
        if part.encodes:
            encode_for_trainers(config, part)
            return
        mesh = build_mesh(config.parallel, part.device)
        with nullcontext() if dry_run else lock_run_folder(Path(config.output_dir)), ExitStack() as resources:
            trainer = Trainer(config, mesh, backend, resources, dry_run, part.links)
            if dry_run:
                trainer.dry_run_step()
            else:
                trainer.train()


def ignore_sample(entry: LatentEntry, reason: str) -> None:
    """For the ranks that leave the report of a bad sample to another."""


class Trainer:
    """The parts of a run, built in the order in which a batch meets them, and the loop over them.

    Args:
        resources: closed by the caller, however the run ends.
        links: of this rank to ranks that encode for it; see `JobPart.links`.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: ParallelMesh,
        backend: DeviceBackend,
        resources: ExitStack,
        dry_run: bool,
        links: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.config, self.mesh, self.backend, self.dry_run = config, mesh, backend, dry_run
        self.output = Path(config.output_dir)
        training = config.training

        self.worker_metrics = WorkerMetrics(config.storage.alluxio_metrics if mesh.is_main else [])
        self.storage_counts = counters.snapshot()
        self.store = resources.enter_context(
            closing(open_dataset(config, mesh.device, allow_synthetic=dry_run, links=links))
        )

        # Model and objective.
        self.family = FAMILIES[config.model.family]
        self.objective = build_objective(config.objective, self.family)
        self.compute_dtype = getattr(torch, training.precision)
        self.model, self.sequence = build_model(
            config,
            mesh,
            latent_channels=self.store.entries[0].latent_shape[0],
            text_hidden_size=self.store.null_prompt()[0].shape[-1],
            compute_dtype=self.compute_dtype,
        )
        for channels, frames, *size in {entry.latent_shape for entry in self.store.entries}:
            self.family.check_latents(self.model, (channels, frames + self._num_padding_frames(frames), *size))

        # Data: stored latents, in an order that is a function of the step.
        entries, held_out = split_holdout(self.store.entries, config.validation, config.seed)
        self.digest = dataset_digest(entries)
        self.order = training_order(config, self.store, entries, mesh.data_degree)
        if mesh.is_main:
            self._report_tails()
        collator = Collator(
            seed=config.seed,
            normalization=self.store.normalization,
            null_prompt=null_prompt(self.family, self.model, self.store, max_text_tokens(config.text_encoder)),
            caption_dropout=config.objective.caption_dropout,
            max_text_tokens=max_text_tokens(config.text_encoder),
            num_padding_frames=self._num_padding_frames,
            uses_first_frame=self.family.takes_first_frame(self.model),
        )
        self.loader = LatentLoader(
            store=self.store,
            entries=entries,
            order=self.order,
            collator=collator,
            data_rank=mesh.data_rank,
            data_degree=mesh.data_degree,
            micro_batch_size=training.micro_batch_size,
            workers=config.storage.loader_workers,
            prefetch_bytes=config.storage.prefetch_mib * 2**20,
            # The ranks of one sequence-parallel group read the same samples; one of them reports.
            on_bad_sample=self._quarantine_sample if mesh.sequence_rank == 0 else ignore_sample,
        )
        self.quarantine = Quarantine(self.output / "quarantine.jsonl")

        self.samples_consumed: Counter[str] = Counter()
        """Per dataset, by its path; in the checkpoint it says what a resumed run has behind it."""

        # Optimizer step.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optimizer.learning_rate,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
        )
        self.ema = Ema(self.model, config.ema.decay) if config.ema.enabled else None
        self.timer = StepTimer(backend)
        self.train_step = TrainStep(
            model=self.model,
            family=self.family,
            objective=self.objective,
            sequence=self.sequence,
            optimizer=self.optimizer,
            ema=self.ema,
            mesh=mesh,
            config=config.optimizer,
            total_steps=training.steps,
            compute_dtype=self.compute_dtype,
            timer=self.timer,
        )

        # Validation.
        on_bad_sample = self._quarantine_sample if mesh.is_main else ignore_sample
        samples = read_holdout(self.store, held_out, on_bad_sample)
        self.held_out = [sample.entry for sample in samples]
        self.validation_batches = validation_batches(
            samples, replace(collator, caption_dropout=0.0), training.micro_batch_size
        )
        self.sampler: Sampler | None = None
        if config.validation.num_videos and not dry_run:
            self.sampler = build_sampler(
                config,
                mesh,
                self.model,
                self.sequence,
                build_vae(config.vae, mesh.device),
                negative_prompt(config, self.store.null_prompt()),
            )
        self.stop_requested = False

    def train(self) -> None:
        """The loop: data, step, metrics, validation, checkpoint."""
        config, mesh = self.config, self.mesh
        start = self._resume()
        signal.signal(signal.SIGTERM, self._request_stop)
        metrics = MetricsLog(self.output, config, is_main=mesh.is_main, resumed_step=start)
        progress = TrainingProgress(config.training.steps, start, is_main=mesh.is_main)
        if start == 0:
            metrics.log(0, "validation", self._validate(0))
        skipped_in_a_row = 0
        steps = self.loader.steps(start, config.training.steps)
        agreed = AgreedBatches(self.loader, steps, mesh, config.latents.max_bad_fraction)
        for step in range(start, config.training.steps):
            done, last = step + 1, step + 1 == config.training.steps
            self.timer.enabled = last or done % config.tracking.every_steps == 0
            began = time.perf_counter()
            collectives.reset()
            with self.timer.phase("data"):
                batches = agreed.next_step()
            result = self.train_step(batches, step, self.stop_requested)
            record = self._record(batches, result, step, time.perf_counter() - began)
            progress.update(record)
            if self.timer.enabled or result.stop_requested:
                metrics.log(done, "train", record)
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            if skipped_in_a_row > config.training.max_skipped_steps:
                raise UserError(
                    f"the loss or the gradient norm was not finite in {skipped_in_a_row} steps in a row, more than "
                    "training.max_skipped_steps allows; lower optimizer.learning_rate or look at the data"
                )
            if result.stop_requested and not last:
                # Before anything that takes time: who sends SIGTERM does not wait for long.
                self._save(done)
                logger.info("stopped by SIGTERM after step %d; the same command goes on from there", done)
                break
            if last or done % config.validation.every_steps == 0:
                metrics.log(done, "validation", self._validate(done))
            if last or done % config.checkpoint.every_steps == 0:
                self._save(done)
        self.store.close()  # before the loader, which waits for what it reads
        steps.close()
        metrics.close()
        progress.close()
        self._summarize()

    def dry_run_step(self) -> None:
        """One optimizer step, reported on the terminal."""
        began = time.perf_counter()
        steps = self.loader.steps(0, 1)
        batches = next(steps)
        result = self.train_step(batches, 0)
        record = self._record(batches, result, 0, time.perf_counter() - began)
        self.store.close()
        steps.close()
        if self.mesh.is_main:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            print(
                f"dry run: {self.mesh.world_size} process(es), {self.config.model.family} with {parameters:,} "
                f"parameters, {record['tokens']:,} tokens per step, loss {result.loss:.4f}, peak memory "
                f"{self.backend.peak_memory_bytes() / 2**20:,.0f} MiB; nothing was written"
            )

    def _resume(self) -> int:
        """Loads the newest checkpoint that verifies, if any; returns the number of steps it has behind it."""
        config, folder = self.config, self.output / "checkpoints"
        checkpoint = latest_verified(folder)
        if checkpoint is None:
            self._describe()
            return 0
        if not config.checkpoint.resume:
            raise UserError(
                f"output_dir {self.output} holds {checkpoint.name} and checkpoint.resume is false; choose another "
                "output_dir or allow resuming"
            )
        state = load_checkpoint(checkpoint, self.model, self.optimizer, self.ema)
        for key, value in self._identity().items():
            if state[key] != value:
                raise UserError(
                    f"{key} is {value!r} but {checkpoint} was trained with {state[key]!r}; use that value again or "
                    "another output_dir"
                )
        if state["dataset_digest"] != self.digest and self.mesh.is_main:
            logger.warning("latents.path has other training samples than at %s; the order is new", checkpoint.name)
        self.samples_consumed = Counter(state["samples_consumed"])
        self._describe()
        if self.mesh.is_main:
            logger.info("resuming from %s", checkpoint)
        return int(state["step"])

    def _source_path(self, index: int) -> str:
        """Of the dataset that holds a training sample."""
        if not isinstance(self.store, MixedDataset):
            return self.store.path
        return self.store.source_paths[self.store.source_of(self.loader.entries[index])]

    def _report_tails(self) -> None:
        order = self.order
        for count, what in (
            (order.repeated_per_epoch, "repeats that fill"),
            (order.dropped_per_epoch, "left out with"),
        ):
            if count:
                logger.info(
                    "%d of %d samples per epoch are %s the last batch of a bucket; a smaller "
                    "training.global_batch_size has fewer",
                    count,
                    order.samples_per_epoch + order.dropped_per_epoch,
                    what,
                )

    def _describe(self) -> None:
        def write() -> None:
            save_config(self.config, self.output / "config.resolved.yaml")
            write_environment(self.output, backend=self.backend.name, world_size=self.mesh.world_size)

        on_main_rank(write)

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of one run, by config key."""
        training = self.config.training
        names = ("global_batch_size", "tokens_per_batch", "bucket_batch_sizes", "tail")
        weights = [source.weight for source in self.config.latents.sources]
        return {
            "seed": self.config.seed,
            "latents.sources": weights,
            **{f"training.{name}": getattr(training, name) for name in names},
        }

    def _save(self, done: int) -> None:
        state = {
            "step": done,
            "dataset_digest": self.digest,
            "samples_consumed": dict(self.samples_consumed),
            **self._identity(),
        }
        save_checkpoint(
            self.output / "checkpoints",
            done,
            self.model,
            self.optimizer,
            self.ema,
            state,
            keep_last=self.config.checkpoint.keep_last,
        )

    def _validate(self, done: int) -> dict[str, Any]:
        """Held-out loss, and videos of held-out captions, with the averaged weights where there are any."""
        config = self.config
        with self.ema.applied(self.model) if self.ema is not None else nullcontext():
            losses = validation_loss(
                self.model,
                self.family,
                self.objective,
                self.sequence,
                self.mesh,
                self.validation_batches,
                config.validation.noise_levels,
                self.compute_dtype,
            )
            if self.sampler is not None:
                self._sample_videos(done)
        return {
            "loss": sum(losses.values()) / len(losses),
            "loss_by_noise_level": {str(level): loss for level, loss in losses.items()},
        }

    def _record(self, batches: Sequence[Batch], result: StepResult, step: int, seconds: float) -> dict[str, Any]:
        """The metrics of one step: rates and counts over all ranks, phase seconds and communication of this one."""
        frames = self.mesh.data_degree * sum(batch.num_frames for batch in batches)
        tokens = self.mesh.data_degree * sum(self._num_tokens(batch) for batch in batches)
        batch = self.order.batch(step)
        self.samples_consumed.update(self._source_path(index) for index in batch.indices)
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "skipped": result.skipped,
            "epoch": batch.epoch,
            "bucket": "x".join(map(str, batch.bucket)),
            "samples": len(batch.indices),
            "samples_consumed": dict(self.samples_consumed),
            "frames": frames,
            "tokens": tokens,
            "frames_per_second": frames / seconds,
            "tokens_per_second": tokens / seconds,
            "step_seconds": self.timer.end_step(),
            "communication": collectives.snapshot(),
            "storage": self._storage_counts(),
        }

    def _storage_counts(self) -> dict[str, Any]:
        """What this rank's storage has counted since the last call."""
        before, self.storage_counts = self.storage_counts, counters.snapshot()
        return difference(self.storage_counts, before)

    def _num_padding_frames(self, num_latent_frames: int) -> int:
        return self.family.num_padding_frames(self.model, num_latent_frames)

    def _num_tokens(self, batch: Batch) -> int:
        grid = self.family.token_grid(self.model, tuple(batch.latents.shape[1:]))
        return len(batch.keys) * math.prod(grid)

    def _sample_videos(self, done: int) -> None:
        """Videos of the first held-out captions, under samples/step-N."""
        assert self.sampler is not None
        prompts = stored_prompts(self.store, self.held_out[: self.config.validation.num_videos])
        self.sampler.write_videos(prompts, self.output, step_folder(self.output, done))

    def _summarize(self) -> None:
        """summary.json and report.html, from what the run folder holds."""
        peak = torch.tensor([self.backend.peak_memory_bytes()], dtype=torch.int64, device=self.mesh.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        snapshots = on_all_ranks(counters.snapshot)
        if self.mesh.is_main:
            summary = write_summary(
                self.output,
                self.config,
                world_size=self.mesh.world_size,
                peak_memory_bytes=int(peak),
                clips={"encoded": len(self.store.entries), "quarantined": self.store.num_quarantined},
                storage=usage(snapshots, self.worker_metrics.under_store_bytes()),
            )
            print(f"{describe(summary)}; see {write_report(self.output)}")

    def _quarantine_sample(self, entry: LatentEntry, reason: str) -> None:
        if not self.dry_run:
            self.quarantine.add(QuarantineRow(name=entry.source_name, reason=reason, stage="train"))

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested = True
