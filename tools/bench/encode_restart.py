"""Time of `ttv-train encode` when there is nothing to do, over a dataset of a hundred thousand clips.

    python tools/bench/encode_restart.py [CLIPS]

The dataset is one sample clip under as many names, each with a caption of its own. What an earlier job would have left,
the manifest of the scan and the encoded dataset, is written directly; the shards hold zeros, which a restart does not
read. Then the job runs in a process of its own, as a user starts it; its time includes the interpreter and all imports.
The first one looks at every file and compares every key; those after it find that nothing has changed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from ttv_train import encode
from ttv_train.config import RunConfig
from ttv_train.config_file import parse_config
from ttv_train.data.changed_sources import DATASET_MANIFEST
from ttv_train.data.cut import Cutter
from ttv_train.data.dataset_manifest import write_manifest
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.formats import read_dataset
from ttv_train.data.latent_index import LatentIndex, put_index
from ttv_train.data.manifest import DECODE_VERSION, FORMAT_VERSION, Manifest, put_manifest, put_object
from ttv_train.data.scan import Stamp, scan_video
from ttv_train.data.shards import put_null_prompt
from ttv_train.encoders import dataset_fingerprint
from ttv_train.encoders.clip_encoder import ClipEncoder, EncodedClip
from ttv_train.storage import open_store

SAMPLE = Path(__file__).parents[2] / "data/sample/dog.mp4"
SAMPLES_PER_SHARD = 64
LINKS_PER_FILE = 10_000  # file systems have a limit


def make_dataset(folder: Path, count: int) -> None:
    """Hard links to one clip, with captions."""
    folder.mkdir()
    with (folder / "metadata.jsonl").open("w") as rows:
        for number in range(count):
            name = f"{number:06d}.mp4"
            if number % LINKS_PER_FILE == 0:
                first = folder / name
                first.write_bytes(SAMPLE.read_bytes())
            else:
                os.link(first, folder / name)
            rows.write(json.dumps({"file_name": name, "text": f"a dog, take {number}"}) + "\n")


def write_scan(config: RunConfig) -> list:
    """The manifest of a scan of the dataset; returns its clips."""
    sources, _ = read_dataset(Path(config.dataset.path), config.dataset.layout, False)
    with ClipDecoder(config.dataset) as decoder:
        first = scan_video(sources[0], Cutter.of(config.dataset), decoder, None, False)
    clips = []
    with write_manifest(Path(config.output_dir) / DATASET_MANIFEST, config.dataset) as writer:
        for source in sources:
            status = source.path.stat()
            stamp = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
            mine = [replace(clip, source=source) for clip in first.clips]
            writer.add(replace(first, source=source, stamp=stamp, clips=mine), were_decoded=False)
            clips += mine
    return clips


def write_encoded(config: RunConfig, clips: list) -> None:
    """A committed dataset of these clips."""
    store = open_store(config.latents.path)
    encoder = ClipEncoder(config.vae, config.text_encoder, torch.device("cpu"))
    mean = torch.zeros(encoder.vae.latent_shape(*clips[0].bucket))
    embeds, mask = encoder.encode_null_prompt()
    encoded = EncodedClip(mean, None, embeds, mask, None)
    entries, shards = [], []
    for start in range(0, len(clips), SAMPLES_PER_SHARD):
        shard = put_object(store, "shards/", ".tar", f"shard {start}".encode())
        shards.append(shard)
        for clip in clips[start : start + SAMPLES_PER_SHARD]:
            key = encode.key_of(config, encoder, clip)
            entries.append(replace(encode.make_sample(key, clip, encoded).entry, shard=shard.name))
    index = LatentIndex(encoder.visual_fingerprint, encoder.text_encoder.fingerprint, entries)
    put_manifest(
        store,
        Manifest(
            format_version=FORMAT_VERSION,
            decode_version=DECODE_VERSION,
            fingerprint=dataset_fingerprint(encoder.visual_fingerprint, encoder.text_encoder, config.dataset),
            normalization=encoder.vae.normalization,
            num_samples=len(entries),
            num_quarantined=0,
            null_prompt=put_null_prompt(store, embeds, mask),
            index=put_index(store, index),
            shards=sorted(shards, key=lambda shard: shard.name),
        ),
    )


def main(count: int) -> None:
    """Prints the time of a restart."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "output_dir": f"{folder}/run",
                "device": {"backend": "cpu"},
                "dataset": {"path": f"{folder}/data", "buckets": ["8x96x160"]},
                "latents": {"path": f"{folder}/latents"},
            }
        )
        make_dataset(Path(config.dataset.path), count)
        write_encoded(config, write_scan(config))
        path = Path(folder) / "config.json"
        path.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "ttv_train", "encode", "--config", str(path)]
        for number in range(3):
            started, cpu = time.perf_counter(), os.times()
            subprocess.run(command, check=True)
            seconds, after = time.perf_counter() - started, os.times()
            used = after.children_user + after.children_system - cpu.children_user - cpu.children_system
            print(f"restart {number}: {count:,} clips, {seconds:.2f} s, {used:.2f} s of CPU time")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
