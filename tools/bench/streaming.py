"""Latent streaming, side by side: ttv-train, webdataset, mosaicml-streaming, litdata and Parquet as FastVideo reads it.

    python tools/bench/streaming.py FOLDER [--samples 96] [--rounds 3] [--places mount]

Writes the same samples (safetensors of about 2.9 MB) in every format under FOLDER, then reads one shuffled epoch with
every reader from a local folder, from a throttled S3 store (50 ms, 50 MB/s), and from a local Alluxio through its
mount and its S3 API (see tools/alluxio; left out where it cannot run). Each reading is a process of its own, the
readers take turns, and medians over the rounds are printed; every reader ends with the tensors in memory. Then the wait
of our loader beside a step of 200 ms. Peers that are not installed are left out:

    pip install webdataset mosaicml-streaming litdata pyarrow boto3
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load, save

TOOLS = Path(__file__).resolve().parents[1]
# Or else `import streaming` would find this file instead of mosaicml-streaming.
sys.path = [str(TOOLS.parent), *(path for path in sys.path if Path(path).resolve() != TOOLS / "bench")]

LATENTS, TOKENS = (16, 13, 60, 90), (226, 1024)
SAMPLES_PER_SHARD = 32
PARQUET_READS = 2
"""A row costs its whole row group: more would only take longer."""
BATCH = 4
STEP_SECONDS = 0.2


@dataclass(frozen=True)
class Place:
    """Where the formats lie: in a folder, or behind an S3 endpoint in the bucket `bench`."""

    name: str
    folder: str = ""
    endpoint: str = ""

    def path(self, name: str) -> str:
        """For a reader that takes folders and s3:// URLs."""
        return f"{self.folder}/{name}" if self.folder else f"s3://bench/{name}"


def sample_bytes(number: int) -> bytes:
    """A sample as every format stores it."""
    generator = torch.Generator().manual_seed(number)
    return save(
        {
            "mean": torch.randn(LATENTS, generator=generator).bfloat16(),
            "prompt_embeds": torch.randn(TOKENS, generator=generator).bfloat16(),
            "prompt_mask": torch.ones(TOKENS[0], dtype=torch.bool),
        }
    )


# Writers


def write_ours(folder: Path, samples: int) -> None:
    """The shards of ttv-train, which webdataset reads too."""
    from ttv_train.data import manifest
    from ttv_train.data.latent_index import LatentIndex, put_index
    from ttv_train.data.shards import LatentSample, put_null_prompt, put_shard
    from ttv_train.encoders.vae.base import LatentNormalization
    from ttv_train.storage import open_store

    store = open_store(str(folder / "ours"))
    shards, entries = [], []
    for start in range(0, samples, SAMPLES_PER_SHARD):
        batch = []
        for number in range(start, min(samples, start + SAMPLES_PER_SHARD)):
            tensors = load(sample_bytes(number))
            entry = manifest.LatentEntry(
                key=f"{number:032x}",
                shard="",
                offset=0,
                length=0,
                sha256="",
                xxh3="",
                source_name=f"{number}.mp4",
                source_sha256=f"{number:064x}",
                clip_index=0,
                is_last_clip=False,
                caption="",
                bucket=(49, 480, 720),
                fps=8.0,
                latent_shape=LATENTS,
                num_text_tokens=TOKENS[0],
            )
            batch.append(LatentSample(entry, tensors["mean"], None, tensors["prompt_embeds"], tensors["prompt_mask"]))
        shard, placed = put_shard(store, batch)
        shards.append(shard)
        entries += placed
    manifest.put_manifest(
        store,
        manifest.Manifest(
            format_version=manifest.FORMAT_VERSION,
            decode_version=manifest.DECODE_VERSION,
            fingerprint="",
            normalization=LatentNormalization(shift=(0.0,), scale=(1.0,)),
            num_samples=samples,
            num_quarantined=0,
            null_prompt=put_null_prompt(store, torch.zeros(TOKENS), torch.ones(TOKENS[0], dtype=torch.bool)),
            index=put_index(store, LatentIndex("", "", entries)),
            shards=shards,
        ),
    )


def write_mosaicml(folder: Path, samples: int) -> None:
    """MDS shards."""
    from streaming import MDSWriter

    size = SAMPLES_PER_SHARD * len(sample_bytes(0))
    with MDSWriter(out=str(folder / "mosaicml"), columns={"data": "bytes"}, size_limit=size) as writer:
        for number in range(samples):
            writer.write({"data": sample_bytes(number)})


def write_litdata(folder: Path, samples: int) -> None:
    """Chunks of litdata."""
    import litdata

    litdata.optimize(
        sample_bytes, list(range(samples)), str(folder / "litdata"), chunk_size=SAMPLES_PER_SHARD, num_workers=1
    )


def write_parquet(folder: Path, samples: int) -> None:
    """A file per shard with one row group, compressed with zstd, as FastVideo's preprocessing leaves it."""
    import pyarrow
    import pyarrow.parquet

    (folder / "parquet").mkdir()
    for start in range(0, samples, SAMPLES_PER_SHARD):
        rows = [sample_bytes(number) for number in range(start, min(samples, start + SAMPLES_PER_SHARD))]
        table = pyarrow.table({"data": pyarrow.array(rows, pyarrow.binary())})
        pyarrow.parquet.write_table(table, folder / f"parquet/{start:06d}.parquet", compression="zstd")


# Readers: each yields the tensors of one sample after the other, in a shuffled order.

Sample = dict[str, torch.Tensor]


def our_store(place: Place) -> Any:
    """Our dataset at a place."""
    from ttv_train.data.shards import LatentStore

    if place.folder:
        return LatentStore.open(place.path("ours"))
    return LatentStore.open(f"alluxio+s3://{place.endpoint.removeprefix('http://')}/bench/ours")


def read_ours(place: Place, samples: int) -> Iterator[Sample]:
    """ttv-train, verifying every digest."""
    from ttv_train.data.read_ahead import read_ahead

    store = our_store(place)
    entries = random.Random(0).sample(store.entries, samples)
    plan = (entries[i : i + BATCH] for i in range(0, samples, BATCH))
    for batch in read_ahead(store, plan, workers=4, max_bytes=2**30):
        for sample in batch:
            yield {"mean": sample.mean, "prompt_embeds": sample.prompt_embeds}


def read_webdataset(place: Place, samples: int) -> Iterator[Sample]:
    """webdataset, shuffling shards and a buffer of samples; behind a URL through curl, as its documentation does."""
    import webdataset

    names = sorted(path.name for path in (Path(os.environ["BENCH_FOLDER"]) / "ours/shards").iterdir())
    urls = [f"{place.folder}/ours/shards/{name}" for name in names]
    if not place.folder:
        user = "AWS4-HMAC-SHA256 Credential=root/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
        urls = [f"pipe:curl -sf -H 'Authorization: {user}' {place.endpoint}/bench/ours/shards/{name}" for name in names]
    for sample in webdataset.WebDataset(urls, shardshuffle=len(urls), seed=0).shuffle(32):
        yield load(sample["safetensors"])


def read_mosaicml(place: Place, samples: int) -> Iterator[Sample]:
    """mosaicml-streaming; a remote place is downloaded shard by shard."""
    from streaming import StreamingDataset

    with tempfile.TemporaryDirectory() as cache:
        options = {"local": place.path("mosaicml")}
        if not place.folder:
            options = {"local": cache, "remote": place.path("mosaicml")}
        for sample in StreamingDataset(**options, shuffle=True, batch_size=BATCH):
            yield load(sample["data"])


def read_litdata(place: Place, samples: int) -> Iterator[Sample]:
    """litdata; a remote place is downloaded chunk by chunk."""
    import litdata

    with tempfile.TemporaryDirectory() as cache:
        options = {} if place.folder else {"cache_dir": cache, "storage_options": {"endpoint_url": place.endpoint}}
        for sample in litdata.StreamingDataset(place.path("litdata"), shuffle=True, **options):
            yield load(bytes(sample))


def read_parquet(place: Place, samples: int) -> Iterator[Sample]:
    """A row per access, which reads its row group, as FastVideo's map-style dataset does."""
    import pyarrow.parquet

    filesystem = None
    if not place.folder:
        import s3fs

        filesystem = s3fs.S3FileSystem(
            endpoint_url=place.endpoint, key="root", secret="none", default_cache_type="none"
        )
    rows = random.Random(0).sample(range(samples), min(samples, PARQUET_READS))
    for row in rows:
        start = row // SAMPLES_PER_SHARD * SAMPLES_PER_SHARD
        path = place.path(f"parquet/{start:06d}.parquet").removeprefix("s3://")
        with pyarrow.parquet.ParquetFile(path, filesystem=filesystem) as file:
            column = file.read_row_group(0)["data"]
        yield load(column[row - start].as_py())


READERS: dict[str, tuple[Callable[[Place, int], Iterator[Sample]], tuple[str, ...]]] = {
    "ttv-train": (read_ours, ("ttv_train.data.read_ahead", "s3fs")),
    "webdataset": (read_webdataset, ("webdataset",)),
    "mosaicml-streaming": (read_mosaicml, ("streaming", "boto3")),
    "litdata": (read_litdata, ("litdata", "boto3")),
    "Parquet": (read_parquet, ("pyarrow.parquet", "s3fs")),
}
"""With the modules that each imports; the clock starts when they are loaded."""
WRITERS = {"mosaicml-streaming": write_mosaicml, "litdata": write_litdata, "Parquet": write_parquet}


def measure(reader: str, place: Place, samples: int) -> dict[str, float]:
    """One epoch in this process, from opening the dataset to the last tensor."""
    read, modules = READERS[reader]
    for module in modules:
        importlib.import_module(module)
    started, cpu = time.perf_counter(), time.process_time()
    count = num_bytes = 0
    for sample in read(place, samples):
        count += 1
        num_bytes += sum(tensor.nbytes for tensor in sample.values())
    seconds = time.perf_counter() - started
    return {
        "samples": count,
        "samples/s": count / seconds,
        "MB/s": num_bytes / seconds / 1e6,
        "cpu_seconds": time.process_time() - cpu,
    }


def measure_wait(place: Place, samples: int) -> dict[str, float]:
    """The part of the time that a step of `STEP_SECONDS` waits for our loader, after the first batch."""
    from ttv_train.data.collate import Collator
    from ttv_train.data.loader import LatentLoader
    from ttv_train.data.order import DataOrder

    store = our_store(place)
    order = DataOrder([entry.bucket for entry in store.entries], seed=0, digest="bench", global_batch_size=2)
    collator = Collator(
        seed=0,
        normalization=store.normalization,
        null_prompt=store.null_prompt(),
        caption_dropout=0.0,
        max_text_tokens=TOKENS[0],
        num_padding_frames=lambda frames: 0,
    )
    loader = LatentLoader(
        store=store,
        entries=store.entries,
        order=order,
        collator=collator,
        data_rank=0,
        data_degree=1,
        micro_batch_size=2,
        on_bad_sample=lambda entry, reason: None,
    )
    steps = loader.steps(0, samples // 2)
    next(steps)
    waited, started = 0.0, time.perf_counter()
    for _ in range(samples // 2 - 1):
        time.sleep(STEP_SECONDS)
        began = time.perf_counter()
        next(steps)
        waited += time.perf_counter() - began
    return {"waited": waited / (time.perf_counter() - started)}


def in_process(folder: Path, what: str, place: Place, samples: int) -> dict[str, float] | str:
    """`measure` or `measure_wait` in a process of its own; the last line of its error if it fails."""
    environment = {
        **os.environ,
        "BENCH_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "AWS_ACCESS_KEY_ID": "root",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "S3_ENDPOINT_URL": place.endpoint,
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }
    command = [sys.executable, __file__, "--read", what, json.dumps(asdict(place)), str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    return json.loads(done.stdout.strip().splitlines()[-1])


def load_tool(name: str) -> ModuleType:
    """A script under tools/, as a module."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places(folder: Path) -> Iterator[Place]:
    """Every place, each gone when the next one is asked for."""
    alluxio, throttled_store = load_tool("alluxio/cluster"), load_tool("bench/throttled_store")
    yield Place("local folder", folder=str(folder / "bench"))
    server = throttled_store.make_server(folder, 0.05, 50e6)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Place("throttled S3", endpoint=f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    cluster = alluxio.Cluster(folder / "alluxio", cache="3GB", dies_with_parent=True)
    try:
        cluster.start()
    except alluxio.ClusterError as error:
        print(f"Alluxio is left out: {error}")
        return
    try:
        shutil.copytree(folder / "bench", cluster.ufs / "bench")
        yield Place("Alluxio, mount", folder=f"{cluster.mount}/bench")
        port = cluster.s3.removeprefix("alluxio+s3://")
        yield Place("Alluxio, S3", endpoint=f"http://{port}")
    finally:
        cluster.stop()


def main() -> None:
    """Writes, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", default="", help="only those with this in their names, such as mount")
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bench").mkdir(parents=True)
    write_ours(folder / "bench", options.samples)
    readers = []
    for reader, (_, modules) in READERS.items():
        if any(importlib.util.find_spec(module.partition(".")[0]) is None for module in modules):
            print(f"{reader} is not installed and left out")
            continue
        if reader in WRITERS:
            WRITERS[reader](folder / "bench", options.samples)
        readers.append(reader)
    for place in places(folder):
        if options.places not in place.name:
            continue
        results: dict[str, list[dict[str, float]]] = {reader: [] for reader in readers}
        for number in range(options.rounds + 1):
            for reader in readers:
                result = in_process(folder / "bench", reader, place, options.samples)
                if isinstance(result, str):
                    print(f"{place.name}, {reader}: {result}")
                elif number:  # the first round warms caches
                    results[reader].append(result)
        for reader, found in results.items():
            if found:
                rate, megabytes, cpu = (
                    statistics.median(result[key] for result in found) for key in ("samples/s", "MB/s", "cpu_seconds")
                )
                per_sample = 1000 * cpu / found[0]["samples"]
                print(f"| {place.name} | {reader} | {rate:.1f} | {megabytes:.0f} | {per_sample:.1f} ms |", flush=True)
        wait = in_process(folder / "bench", "wait", place, options.samples)
        print(
            f"{place.name}: loader wait {wait if isinstance(wait, str) else format(wait['waited'], '.2%')}", flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        where, count = Place(**json.loads(sys.argv[3])), int(sys.argv[4])
        print(json.dumps(measure_wait(where, count) if sys.argv[2] == "wait" else measure(sys.argv[2], where, count)))
    else:
        main()
