"""A synthetic run folder, for tests of the report."""

import json
import math
from pathlib import Path

import numpy as np

from ttv_train.monitor.samples import SampledVideo, step_folder, video_name, write_prompts
from ttv_train.monitor.video import write_video

HOSTILE_CAPTIONS = [
    "A fluffy white dog lies on a shiny floor by a doorway and looks into the camera.",
    "<img src=x onerror=\"document.title='injected'\">",
    "</script><script>document.title='injected'</script>",
    "\" onload='document.title=1' & {{ 7*7 }} ]]> 犬が床に寝そべる \U0001f415 \u202e",
]


def clip(seed: int, noise: float, frames: int = 8, height: int = 96, width: int = 160) -> np.ndarray:
    """Coloured waves drifting over the frames, under noise: uint8 (T, H, W, 3)."""
    generator = np.random.default_rng(seed)
    t, y, x = np.mgrid[0:frames, 0:height, 0:width]
    phases = generator.uniform(0, 6, 3)
    waves = [np.sin(x / 14 + y / (9 + i) + t / 2 + phases[i]) for i in range(3)]
    video = np.stack(waves, axis=-1) * (1 - noise) + generator.normal(0, 1, (*x.shape, 3)) * noise
    return ((video * 0.4 + 0.5).clip(0, 1) * 255).astype(np.uint8)


def write_run(folder: Path, steps: int = 400, validate_every: int = 100) -> Path:
    """Fills `folder` with everything that a finished run leaves for the report."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    records = []
    for step in range(steps + 1):
        decay = math.exp(-step / (steps / 4))
        if step:
            records.append(
                {
                    "step": step,
                    "kind": "train",
                    "loss": None if step == steps // 2 else (0.05 + 0.9 * decay) * float(generator.lognormal(0, 0.25)),
                    "grad_norm": 0.3 + decay + float(generator.exponential(0.1)),
                    "learning_rate": 2e-3 * min(1, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
                    "skipped": step == steps // 2,
                    "epoch": step // 10,
                    "bucket": "8x96x160" if step % 3 else "8x128x128",
                    "samples": 6,
                    "frames": 48,
                    "tokens": 1440,
                    "frames_per_second": 52 + float(generator.normal(0, 2)),
                    "tokens_per_second": 1560 + float(generator.normal(0, 60)),
                    "step_seconds": {
                        "data": 0.002 + float(generator.exponential(0.004)),
                        "forward": 0.27 + float(generator.normal(0, 0.01)),
                        "backward": 0.46 + float(generator.normal(0, 0.02)),
                        "communication": 0.13 + float(generator.exponential(0.02)),
                        "optimizer": 0.04,
                    },
                    "communication": {
                        "attention": {"calls": 32, "bytes": 6_291_456, "seconds": 0.12},
                        "check": {"calls": 1, "bytes": 56, "seconds": 0.001},
                    },
                }
            )
        if step % validate_every == 0:
            levels = {str(level): (0.1 + 0.9 * decay) * (1.2 - level) for level in (0.1, 0.3, 0.5, 0.7, 0.9)}
            records.append(
                {
                    "step": step,
                    "kind": "validation",
                    "loss": sum(levels.values()) / len(levels),
                    "loss_by_noise_level": levels,
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    (folder / "references").mkdir()
    for index in range(len(HOSTILE_CAPTIONS)):
        write_video(folder / "references" / f"key-{index}.mp4", clip(index, 0.0), fps=12)
    for step in range(0, steps + 1, validate_every):
        samples = step_folder(folder, step)
        samples.mkdir(parents=True)
        rows = []
        for index, caption in enumerate(HOSTILE_CAPTIONS if step == steps else HOSTILE_CAPTIONS[:2]):
            name = video_name(index, caption)
            write_video(samples / name, clip(index, math.exp(-step / (steps / 4))), fps=12)
            rows.append(SampledVideo(name, caption, f"key-{index}", "<b>dog</b>.mp4", f"references/key-{index}.mp4"))
        write_prompts(samples, rows)

    quarantined = [
        {
            "name": "broken/<script>alert(1)</script>.mp4",
            "reason": "truncated file: moov atom not found",
            "stage": "encode",
        },
        {"name": "playlist.mp4", "reason": "not a video container: hls", "stage": "encode"},
    ]
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in quarantined))
    summary = {
        "world_size": 2,
        "sequence_parallel": {"scheme": "ulysses", "degree": 2},
        "steps": steps,
        "train_loss": {"first": 0.98, "last": 0.06},
        "validation_loss": {"first": 0.7, "last": 0.08},
        "frames_per_second": 52.0,
        "tokens_per_second": 1560.0,
        "step_seconds": {"forward": 0.27, "backward": 0.46},
        "peak_memory_bytes": 812_345_678,
        "clips": {"encoded": 12, "quarantined": 2},
        "storage": {
            "alluxio_bytes": 3_221_225_472,
            "under_store_bytes": 0,
            "hit_rate": 0.9375,
            "wait_seconds": 1.5,
            "retries": 3,
            "fallbacks": 0,
            "abandoned": 1,
            "errors": {"http_503": 3, "<i>": 1},
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "torch": "2.13.0+cpu", "device": "cpu"}))
    config = f"output_dir: runs/<demo>\nseed: 0\ntraining:\n  steps: {steps}\n  global_batch_size: 6\n"
    (folder / "config.resolved.yaml").write_text(config)
    return folder
