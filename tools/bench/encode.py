"""Frames per second of `ttv-train encode` against the plain loop of other trainers: decode, encode, save, clip by clip.

    python tools/bench/encode.py [--rounds N]

Both encode the same clips of data/sample, each under several captions, on the CPU with one thread of torch, and take
turns: with the `wavelet` VAE, and with diffusers' CogVideoX VAE at a fraction of its width and with random weights. The
plain loop decodes with PyAV in its own process, resizes with torch and saves a .pt file per clip. Time is that of the
work, without imports and the building of the encoders; the job's includes its scan of the dataset, the start of its
decoder processes and its commit.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import av
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX

from ttv_train import encode
from ttv_train.config import RunConfig
from ttv_train.config_file import parse_config
from ttv_train.data.clips import list_clips
from ttv_train.data.cut import Clip
from ttv_train.encoders.clip_encoder import ClipEncoder

SAMPLES = Path(__file__).parents[2] / "data/sample"
CPU = torch.device("cpu")


def make_config(folder: Path, vae: dict, bucket: str) -> RunConfig:
    """A job on the sample clips."""
    return parse_config(
        {
            "output_dir": str(folder / "run"),
            "device": {"backend": "cpu"},
            "dataset": {"path": str(folder / "data"), "buckets": [bucket], "max_clips_per_video": 8},
            "vae": vae,
            "latents": {"path": str(folder / "latents")},
        }
    )


def make_dataset(folder: Path, copies: int) -> None:
    """The sample clips, each `copies` times with captions of their own: equal clips are encoded once."""
    folder.mkdir()
    rows = [json.loads(line) for line in (SAMPLES / "metadata.jsonl").read_text().splitlines()]
    with (folder / "metadata.jsonl").open("w") as file:
        for row in rows:
            for copy in range(copies):
                name = f"{copy}-{row['file_name']}"
                shutil.copy(SAMPLES / row["file_name"], folder / name)
                file.write(json.dumps({"file_name": name, "text": f"{row['text']} {copy}"}) + "\n")


def decode_plainly(clip: Clip) -> torch.Tensor:
    """uint8 (T, H, W, 3): opens the file, seeks, takes the last frame before each wanted time, resizes and crops."""
    num_frames, height, width = clip.bucket
    wanted = [clip.start_seconds + number / clip.fps for number in range(num_frames)]
    frames: list[torch.Tensor] = []
    with av.open(str(clip.source.path)) as container:
        stream = container.streams.video[0]
        container.seek(int(wanted[0] / stream.time_base), stream=stream)
        last = None
        for frame in container.decode(stream):
            while len(frames) < num_frames and last is not None and frame.time > wanted[len(frames)] + 1e-6:
                frames.append(torch.from_numpy(last.to_ndarray(format="rgb24")))
            if len(frames) == num_frames:
                break
            last = frame
        while len(frames) < num_frames:
            frames.append(torch.from_numpy(last.to_ndarray(format="rgb24")))
    video = torch.stack(frames).permute(0, 3, 1, 2).float()
    scale = max(height / video.shape[2], width / video.shape[3])
    size = (round(video.shape[2] * scale), round(video.shape[3] * scale))
    video = F.interpolate(video, size=size, mode="bicubic", antialias=True).clamp(0, 255)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return video[:, :, top : top + height, left : left + width].round().byte().permute(0, 2, 3, 1)


def encode_plainly(config: RunConfig, encoder: ClipEncoder, clips: list[Clip], folder: Path) -> float:
    """Seconds of the plain loop."""
    folder.mkdir()
    started = time.perf_counter()
    for number, clip in enumerate(clips):
        (encoded,) = encoder.encode([decode_plainly(clip)], [clip.source.caption])
        torch.save(vars(encoded), folder / f"{number}.pt")
    return time.perf_counter() - started


def compare(name: str, vae: dict, bucket: str, rounds: int, copies: int) -> None:
    """Prints a line per round."""
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            make_dataset(folder / "data", copies)
            config = make_config(folder, vae, bucket)
            encoder = ClipEncoder(config.vae, config.text_encoder, CPU)
            clips, _ = list_clips(config.dataset, None)
            encoder.encode([torch.zeros(*clips[0].bucket, 3, dtype=torch.uint8)], ["warm up"])
            plain = encode_plainly(config, encoder, clips, folder / "plain")
            summary = encode.run(config)
            assert summary is not None and summary.encoded == len(clips)
            frames = summary.frames
            print(
                f"{name}, round {number}: {len(clips)} clips, {frames} frames; plain {frames / plain:.1f} frames/s, "
                f"job {frames / summary.seconds:.1f} frames/s ({plain / summary.seconds:.2f} x), "
                f"device busy {summary.device_busy:.1%}"
            )


def main() -> None:
    """Compares with both VAEs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    compare("wavelet", {"kind": "wavelet"}, "8x256x256", rounds, 16)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoencoderKLCogVideoX(
            block_out_channels=(8, 16, 16, 32), layers_per_block=1, norm_num_groups=8
        ).save_pretrained(folder)
        compare(
            "narrow CogVideoX 9x128x128",
            {"kind": "diffusers", "path": folder, "dtype": "float32"},
            "9x128x128",
            rounds,
            4,
        )


if __name__ == "__main__":
    main()
