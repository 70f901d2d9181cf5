from pathlib import Path

import pytest

from tests.alluxio_double import PAGE_BYTES, Worker
from tests.unit.data.latent_samples import make_sample, write_store
from ttv_train import cache
from ttv_train.cli import main
from ttv_train.config import RunConfig
from ttv_train.config_file import parse_config
from ttv_train.data.mixing import open_latents

SAMPLES = 12


def make_config(tmp_path: Path, latents: str, **sections: dict) -> RunConfig:
    data = {
        "output_dir": str(tmp_path / "run"),
        "latents": {"path": latents},
        "training": {"steps": 100, "global_batch_size": 2},
        "validation": {"holdout_fraction": 0.2},
    }
    return parse_config(data | sections)


@pytest.fixture
def dataset(tmp_path) -> Path:
    folder = tmp_path / "latents"
    write_store(folder, [make_sample(number) for number in range(SAMPLES)])
    return folder


def test_a_warm_local_tier_holds_what_the_epoch_reads(tmp_path, dataset, capsys):
    config = make_config(tmp_path, str(dataset), storage={"cache_dir": str(tmp_path / "cache")})
    (before,) = cache.status(config)
    assert (before.local, before.alluxio, before.nowhere) == (0, None, None)
    assert cache.warm(config, epochs=1).startswith(f"{SAMPLES} samples")
    (after,) = cache.status(config)
    assert (after.local, after.nowhere) == (after.total, 0)
    assert "on this node   0.0 MiB (100%)" in str(after)
    assert "in Alluxio     nothing: this path does not go through Alluxio" in str(after)


def test_doors_that_do_not_tell_what_alluxio_holds_say_so(tmp_path, dataset):
    worker = Worker(tmp_path)
    try:
        (found,) = cache.status(make_config(tmp_path, f"alluxio+s3://127.0.0.1:{worker.port}/latents"))
    finally:
        worker.stop()
    assert (found.alluxio, found.nowhere) == (None, None)
    assert "in Alluxio     not known: neither a mount nor the S3 API tells" in str(found)


def test_warming_follows_the_order_from_the_newest_checkpoint(tmp_path, dataset):
    config = make_config(tmp_path, str(dataset), training={"steps": 6, "global_batch_size": 2})
    opened = open_latents(config.latents)
    everything = cache.upcoming(config, opened, epochs=1)
    assert len(everything) == SAMPLES
    (tmp_path / "run/checkpoints/step-00000005").mkdir(parents=True)
    left = cache.upcoming(config, opened, epochs=3)
    held_out = SAMPLES - 10
    assert len(left) == held_out + 2
    assert left[:held_out] == everything[:held_out]


def test_alluxio_loads_what_it_has_not(tmp_path, dataset, capsys):
    worker = Worker(tmp_path)
    url = f"alluxio://127.0.0.1:{worker.port}"
    storage = {"under_stores": {url: f"file://{tmp_path}"}, "alluxio_page_bytes": PAGE_BYTES}
    config = make_config(tmp_path, f"{url}/latents", storage=storage)
    shard = next((dataset / "shards").iterdir()).relative_to(tmp_path)
    worker.evicted = {(str(shard), None)}
    try:
        assert cache.status(config)[0].alluxio == 0
        assert "loaded by Alluxio" in cache.warm(config, epochs=1)
        (after,) = cache.status(config)
        assert (after.alluxio, after.nowhere) == (after.total, 0)
    finally:
        worker.stop()


def test_the_command_line(tmp_path, dataset, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(f"latents: {{path: {dataset}}}\ntraining: {{global_batch_size: 2}}\n")
    overrides = ["--output_dir", str(tmp_path / "run"), "--storage.cache_dir", str(tmp_path / "cache")]
    assert main(["cache", "warm", "--config", str(path), "--epochs", "2", *overrides]) == 0
    assert main(["cache", "status", "--config", str(path), *overrides]) == 0
    output = capsys.readouterr().out
    assert f"{SAMPLES} samples (0.0 MiB) read; 0 could not be read" in output
    assert f"{dataset}: {SAMPLES} samples" in output
