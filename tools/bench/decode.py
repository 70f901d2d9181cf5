"""Decoding clips: this project's path against PyAV, decord and torchcodec used directly, for the same frames.

    python tools/bench/decode.py FOLDER [--rounds 3] [--opens 0]

Every contender delivers the same frames of every video in FOLDER as RGB uint8 arrays whose short side has 256 pixels:

    sequential   all frames, in clips of 16 that follow each other, from one open file
    strided      16 frames, every fourth one, from a random start; the file is opened for each clip
    random       16 frames that follow each other, from a random start; the file is opened for each clip

Contenders run in processes of their own, in turn, on one thread. Printed are frames per second of CPU time, the best of
the rounds, and the peak memory of the process that decodes. Ours is the CPU time of both of its processes: the one that
asks, and the child that decodes behind limits and also demuxes the file to index it. A file that our index knows one of
the contenders to show wrong is left out for all. `--opens N` then opens files N times more and prints memory.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import psutil

from ttv_train.config import DatasetConfig
from ttv_train.data.cut import Clip
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.decoders import DECODERS
from ttv_train.data.formats import VideoSource
from ttv_train.data.frame_index import build_index
from ttv_train.data.probe import BadVideoError, VideoFile, VideoLimits

SHORT_SIDE, CLIP_FRAMES, CLIPS_PER_FILE = 256, 16, 4
MODES = ("sequential", "strided", "random")


@dataclass(frozen=True)
class Job:
    """Frames of one file."""

    path: str
    size: tuple[int, int]
    """Height and width of the result."""
    times: list[float]
    """Of every frame of the file, from the first."""
    clips: list[list[int]]
    """Numbers of the frames of each clip."""


def decode_pyav(job: Job, reopen: bool) -> int:
    """As its documentation shows: seek, then decode up to the last frame that is wanted."""
    container = None
    for numbers in job.clips:
        if container is None or reopen:
            container = av.open(job.path)
            container.streams.video[0].codec_context.thread_count = 1
        stream = container.streams.video[0]
        first = stream.start_time or 0
        wanted = {first + round(job.times[number] / stream.time_base) for number in numbers}
        container.seek(min(wanted), stream=stream)
        pictures = []
        for frame in container.decode(stream):
            if frame.pts in wanted:
                height, width = job.size
                pictures.append(frame.reformat(width, height, "rgb24").to_ndarray())
            if len(pictures) == len(wanted):
                break
        assert len(np.stack(pictures)) == len(numbers)
        if reopen:
            container.close()
    return sum(map(len, job.clips))


def decode_decord(job: Job, reopen: bool) -> int:
    """`get_batch` of a reader that scales."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    height, width = job.size
    reader = None
    for numbers in job.clips:
        if reader is None or reopen:
            reader = decord.VideoReader(job.path, width=width, height=height, num_threads=1)
        assert reader.get_batch(numbers).asnumpy().shape == (len(numbers), height, width, 3)
    return sum(map(len, job.clips))


def decode_torchcodec(job: Job, reopen: bool) -> int:
    """`get_frames_at` of a decoder in exact mode, which scales where its version can."""
    import torch
    from torch.nn.functional import interpolate
    from torchcodec.decoders import VideoDecoder

    torch.set_num_threads(1)
    height, width = job.size
    decoder = None
    for numbers in job.clips:
        if decoder is None or reopen:
            decoder = VideoDecoder(job.path, num_ffmpeg_threads=1, seek_mode="exact")
        frames = decoder.get_frames_at(numbers).data
        frames = interpolate(frames.float(), size=(height, width), mode="bilinear", antialias=True)
        assert frames.round().clamp(0, 255).byte().shape == (len(numbers), 3, height, width)
    return sum(map(len, job.clips))


def decode_torchcodec_filter(job: Job, reopen: bool) -> int:
    """The same with FFmpeg's scaler, as a transform of the decoder."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import Resize

    height, width = job.size
    decoder = None
    for numbers in job.clips:
        if decoder is None or reopen:
            resize = Resize((height, width))
            decoder = VideoDecoder(job.path, num_ffmpeg_threads=1, seek_mode="exact", transforms=[resize])
        assert decoder.get_frames_at(numbers).data.shape == (len(numbers), 3, height, width)
    return sum(map(len, job.clips))


DIRECT: dict[str, Callable[[Job, bool], int]] = {
    "PyAV": decode_pyav,
    "decord2": decode_decord,
    "torchcodec": decode_torchcodec,
    "torchcodec, scaling filter": decode_torchcodec_filter,
}


def decode_ours(decoder: ClipDecoder, job: Job) -> int:
    """`ClipDecoder.decode`, with the frames given by their times."""
    path = Path(job.path)
    for numbers in job.clips:
        step = (job.times[numbers[-1]] - job.times[numbers[0]]) / (len(numbers) - 1)
        bucket = (len(numbers), *job.size)
        clip = Clip(VideoSource(path, path.name, ""), "", bucket, job.times[numbers[0]], 1 / step, 0, False)
        assert len(decoder.decode(clip)) == len(numbers)
    return sum(map(len, job.clips))


def measure(contender: str, jobs: list[Job], reopen: bool, opens: int) -> dict[str, float]:
    """CPU seconds per pass, and peak memory, in this process or with its child."""
    if contender.startswith("ours"):
        with ClipDecoder(DatasetConfig(decoder=contender.split()[-1])) as decoder:
            decode_ours(decoder, jobs[0])
            (child,) = psutil.Process().children()
            before = cpu_seconds(child)
            frames = sum(decode_ours(decoder, job) for job in jobs)
            result = {"frames": frames, "seconds": cpu_seconds(child) - before, "memory": peak_memory(child)}
            if opens:
                result |= open_often(decoder, jobs, opens)
            return result
    decode = DIRECT[contender]
    decode(jobs[0], reopen)
    before = time.process_time()
    frames = sum(decode(job, reopen) for job in jobs)
    return {
        "frames": frames,
        "seconds": time.process_time() - before,
        "memory": peak_memory(psutil.Process()),
    }


def open_often(decoder: ClipDecoder, jobs: list[Job], opens: int) -> dict[str, float]:
    """Highest resident MB of the decoding process during the first and the last tenth of many opens."""
    highest = {"early": 0.0, "late": 0.0}
    for number in range(opens):
        job = jobs[number % len(jobs)]
        decode_ours(decoder, Job(job.path, job.size, job.times, job.clips[:1]))
        part = "early" if number < opens // 10 else "late" if number >= opens - opens // 10 else None
        if part is not None:
            (child,) = psutil.Process().children()
            highest[part] = max(highest[part], child.memory_info().rss / 2**20)
    return highest


def cpu_seconds(child: psutil.Process) -> float:
    """Of this process and the decoding child."""
    times = child.cpu_times()
    return time.process_time() + times.user + times.system


def peak_memory(process: psutil.Process) -> float:
    """Highest resident memory of a process so far, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def make_jobs(folder: Path, mode: str) -> list[Job]:
    """One job per file whose frames every decoder shows right."""
    jobs = []
    for path in sorted(folder.iterdir()):
        try:
            with VideoFile(str(path), VideoLimits(2**26, 3600)) as video:
                index = build_index(video)
        except BadVideoError:
            continue
        info = index.info
        count = info.num_frames
        regular = max(np.diff(index.pts), default=1) == min(np.diff(index.pts), default=0)
        if count <= 4 * CLIP_FRAMES or not regular or any(decoder.refusal(index) for decoder in DECODERS.values()):
            continue
        scale = SHORT_SIDE / min(info.height, info.width)
        size = (round(info.height * scale), round(info.width * scale))
        random.seed(f"{path.name} {mode}")
        step = 4 if mode == "strided" else 1
        starts = [random.randrange(count - CLIP_FRAMES * step) for _ in range(CLIPS_PER_FILE)]
        if mode == "sequential":
            starts = list(range(0, count - CLIP_FRAMES + 1, CLIP_FRAMES))
        clips = [list(range(start, start + CLIP_FRAMES * step, step)) for start in starts]
        jobs.append(Job(str(path), size, [index.seconds(pts) for pts in index.pts], clips))
    return jobs


def one_clip_each(jobs: list[Job]) -> list[Job]:
    """The clips in an order in which no two of one file follow each other."""
    return [Job(job.path, job.size, job.times, [job.clips[number]]) for number in range(CLIPS_PER_FILE) for job in jobs]


def main() -> None:
    """Runs every contender in a process of its own and prints a table per mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--opens", type=int, default=0)
    parser.add_argument("--measure", nargs=2, metavar=("MODE", "CONTENDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        mode, contender = options.measure
        jobs = make_jobs(options.folder, mode)
        jobs = jobs if mode == "sequential" else one_clip_each(jobs)
        print(json.dumps(measure(contender, jobs, mode != "sequential", options.opens)))
        return
    contenders = ["ours, pyav", "ours, auto", *DIRECT]
    for mode in MODES:
        names = [Path(job.path).name for job in make_jobs(options.folder, mode)]
        results: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
        for _ in range(options.rounds):
            for contender in contenders:
                command = [sys.executable, __file__, str(options.folder), "--measure", mode, contender]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results[contender].append(json.loads(done.stdout.splitlines()[-1]))
        rates = {name: max(r["frames"] / r["seconds"] for r in rounds) for name, rounds in results.items()}
        best = max(rates[name] for name in DIRECT)
        print(f"\n{mode}: {', '.join(names)}")
        for name, rounds in results.items():
            memory = max(result["memory"] for result in rounds)
            rate = rates[name]
            print(f"  {name:28} {rate:7.0f} frames/CPU s  {rate / best:5.2f} x best direct  {memory:5.0f} MB")
    if options.opens:
        command = [sys.executable, __file__, str(options.folder), "--opens", str(options.opens)]
        done = subprocess.run(
            [*command, "--measure", "random", "ours, pyav"], capture_output=True, text=True, check=True
        )
        memory = json.loads(done.stdout.splitlines()[-1])
        early, late = memory["early"], memory["late"]
        print(f"\n{options.opens} opens: at most {early:.1f} MB in the first tenth, {late:.1f} MB in the last")


if __name__ == "__main__":
    main()
