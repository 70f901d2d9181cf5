"""Ranks that train on the same clips and share the work of encoding them."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config
from tests.harness import RankError, run_ranks
from tests.unit.data.test_loader import keys, make_loader
from tests.unit.encoders.tiny_models import save_vae
from ttv_train import encode
from ttv_train.config import DiffusersVaeConfig, RunConfig, VaeParallelConfig
from ttv_train.data import clip_reader, keyed_clips, online
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.sample_messages import pack_results
from ttv_train.data.shards import LatentSample, LatentStore, pack_sample


class FailingDecoder(FakeDecoder):
    def decode(self, clip):
        raise MemoryError("no memory for frames")


def open_dataset(folder: Path, parallel: dict, sequence_degree: int, decoder: type = FakeDecoder) -> LatentDataset:
    clips = [make_clip(number, name=f"{number}-broken.mp4" if number == 3 else None) for number in range(6)]
    clip_reader.ClipDecoder, keyed_clips.list_clips = decoder, fake_list_clips(clips)
    sequence = {"scheme": "ulysses" if sequence_degree > 1 else "none", "degree": sequence_degree}
    config = make_config(folder, vae={"parallel": parallel}, parallel={"sequence": sequence})
    return online.open_online(config, torch.device("cpu"), writes=False)


def read_all(rank: int, world_size: int, folder: Path, parallel: dict, degree: int) -> tuple[dict, bytes]:
    """Everything twice, from two threads, one of which begins elsewhere on each rank; every bit of it, and why the rest
    cannot be read."""
    with closing(open_dataset(folder, parallel, degree)) as dataset:
        entries = list(dataset.entries)
        turned = entries[rank % 3 :] + entries[: rank % 3]
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(dataset.read_many, [turned, entries])
        assert pack_results(turned, first) == pack_results(turned, second[rank % 3 :] + second[: rank % 3])
        assert dataset.null_prompt()[0].shape[-1] == 8
        return pack_results(entries, second)


@pytest.mark.parametrize(("mode", "degree", "world_size"), [("none", 1, 3), ("time", 2, 2), ("space", 2, 4)])
def test_a_group_reads_what_one_process_reads(mode, degree, world_size, tmp_path):
    """One of the clips cannot be decoded: it is a corrupt sample on all ranks."""
    (alone,) = run_ranks(1, read_all, tmp_path, {}, 1)
    assert [reason is None for _, reason, _ in alone[0]["results"]] == [True, True, True, False, True, True]
    found = run_ranks(world_size, read_all, tmp_path, {"mode": mode, "degree": degree}, world_size)
    assert found == [alone] * world_size


WAN_CLIPS = [replace(make_clip(number), bucket=(9, 16, 24)) for number in range(3)]


def wan_config(folder: Path) -> RunConfig:
    sections = {"dataset": {"buckets": ["9x16x24"]}, "parallel": {"sequence": {"scheme": "ulysses", "degree": 2}}}
    parallel = VaeParallelConfig(mode="time", degree=2)
    vae = DiffusersVaeConfig(kind="diffusers", path=str(folder / "wan"), parallel=parallel)
    return make_config(folder, **sections).model_copy(update={"vae": vae})


def encode_offline(rank: int, world_size: int, folder: Path) -> dict[str, bytes]:
    encode.ClipDecoder, keyed_clips.list_clips = FakeDecoder, fake_list_clips(WAN_CLIPS)
    config = wan_config(folder)
    encode.encode_dataset(config, torch.device("cpu"))
    store = LatentStore.open(config.latents.path)
    return {entry.key: pack_sample(store.read(entry)) for entry in store.entries}


def encode_online(rank: int, world_size: int, folder: Path) -> dict[str, bytes]:
    clip_reader.ClipDecoder, keyed_clips.list_clips = FakeDecoder, fake_list_clips(WAN_CLIPS)
    with closing(online.open_online(wan_config(folder), torch.device("cpu"), writes=False)) as dataset:
        return {entry.key: pack_sample(dataset.read(entry)) for entry in dataset.entries}


def test_a_group_makes_the_bits_of_the_offline_job(tmp_path):
    """Of a VAE with halos and norms across ranks, in half precision."""
    save_vae(tmp_path / "wan", "AutoencoderKLWan")
    stored = run_ranks(2, encode_offline, tmp_path)
    assert len(stored[0]) == len(WAN_CLIPS)
    assert run_ranks(2, encode_online, tmp_path) == stored


def load(rank: int, world_size: int, folder: Path, parallel: dict, degree: int) -> list[list[str]]:
    with closing(open_dataset(folder, parallel, degree)) as dataset:
        return keys(make_loader(dataset, global_batch_size=2), 0, 6)


@pytest.mark.parametrize("parallel", [{}, {"mode": "space", "degree": 2}])
def test_a_bad_clip_is_replaced_alike_on_all_ranks(parallel, tmp_path):
    (alone,) = run_ranks(1, load, tmp_path, {}, 1)
    assert run_ranks(2, load, tmp_path, parallel, 2) == [alone, alone]


def read_until_it_fails(rank: int, world_size: int, folder: Path) -> str:
    with closing(open_dataset(folder, {"mode": "time", "degree": 2}, 2, FailingDecoder)) as dataset:
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            dataset.read(dataset.entries[0])
        return str(caught.value)


def test_what_fails_on_the_leader_fails_on_all_ranks(tmp_path):
    leader, follower = run_ranks(2, read_until_it_fails, tmp_path, timeout=20)
    assert leader == "no memory for frames"
    assert follower.endswith("MemoryError: no memory for frames")


def close_while_reading(rank: int, world_size: int, folder: Path) -> tuple[bool, str]:
    """The leader reads one of the two samples that the other rank waits for."""
    dataset = open_dataset(folder, {"mode": "time", "degree": 2}, 2)
    first = dataset.read(dataset.entries[0])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(dataset.read, dataset.entries[1]) if rank == 1 else None
        dataset.close()
        dataset.close()
        error = None if reading is None else reading.exception()
    return isinstance(first, LatentSample), str(error)


def test_closing_ends_the_reads_that_wait(tmp_path):
    results = run_ranks(2, close_while_reading, tmp_path, timeout=20)
    assert [is_sample for is_sample, _ in results] == [True, True]
    assert "the dataset is closed" in results[1][1]


def test_ranks_that_train_on_different_clips_cannot_encode_together(tmp_path):
    message = r"vae.parallel.degree 2 does not divide parallel.sequence.degree 1: with latents.online"
    with pytest.raises(RankError, match=message):
        run_ranks(2, read_all, tmp_path, {"mode": "time", "degree": 2}, 1)
