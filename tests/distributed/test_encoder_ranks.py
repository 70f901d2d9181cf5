"""Ranks that encode for others: what arrives, what fails, and how it ends."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.encode_parts import FakeDecoder, make_clip, make_config
from tests.harness import RankError, run_ranks
from ttv_train.data import clip_reader
from ttv_train.data.clip_reader import ClipReader
from ttv_train.data.encoder_link import EncoderLink
from ttv_train.data.encoder_service import serve
from ttv_train.data.keyed_clips import entry_of
from ttv_train.data.remote import RemoteDataset, ask_about_encoders
from ttv_train.data.sample_messages import pack_results
from ttv_train.data.shards import CorruptSampleError
from ttv_train.errors import UserError
from ttv_train.parallel.encoder_ranks import ENCODER, TRAINER, linked

CLIPS = {str(number): make_clip(number, name="broken.mp4" if number == 3 else None) for number in range(6)}


class FailingDecoder(FakeDecoder):
    def decode(self, clip):
        raise MemoryError("no memory for frames")


def make_reader(folder: Path, decoder: type = FakeDecoder) -> ClipReader:
    clip_reader.ClipDecoder = decoder
    return ClipReader(make_config(folder), torch.device("cpu"))


def link_to(trainer: int, encoder: int, end: int) -> dist.ProcessGroupGloo:
    store = dist.PrefixStore(f"link {trainer} {encoder}", dist.distributed_c10d._get_default_store())
    return dist.ProcessGroupGloo(store, end, 2, timedelta(seconds=20))


def open_remote(folder: Path, links: list[EncoderLink]) -> RemoteDataset:
    reader = make_reader(folder)
    entries = [entry_of(key, clip, reader.encoder) for key, clip in CLIPS.items()]
    null_prompt = ask_about_encoders(links[0], reader.encoder.fingerprints)
    assert torch.equal(null_prompt[0], reader.null_prompt()[0])
    return RemoteDataset("clips", CLIPS, entries, 0, reader.encoder.vae.normalization, null_prompt, links)


def read_from_encoders(rank: int, world_size: int, folder: Path, num_trainers: int) -> tuple[dict, bytes] | None:
    """Everything, from several threads; the last ranks encode."""
    encodes = rank >= num_trainers
    pairs = linked(num_trainers, world_size - num_trainers)
    mine = [pair for pair in pairs if rank == (num_trainers + pair[1] if encodes else pair[0])]
    if encodes:
        serve(make_reader(folder), [link_to(*pair, ENCODER) for pair in mine])
        return None
    with closing(open_remote(folder, [EncoderLink(link_to(*pair, TRAINER)) for pair in mine])) as dataset:
        with ThreadPoolExecutor(3) as pool:
            first, second, third = pool.map(dataset.read_many, [dataset.entries, dataset.entries[::-1], []])
        assert pack_results(dataset.entries, first) == pack_results(dataset.entries, second[::-1])
        assert third == []
        return pack_results(dataset.entries, first)


@pytest.mark.parametrize(("num_trainers", "num_encoders"), [(2, 1), (1, 2)])
def test_trainers_get_what_the_encoder_of_one_process_makes(num_trainers, num_encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(clip_reader, "ClipDecoder", FakeDecoder)
    reader = ClipReader(make_config(tmp_path), torch.device("cpu"))
    entries = [entry_of(key, clip, reader.encoder) for key, clip in CLIPS.items()]
    alone = pack_results(entries, [reader.read(entry, CLIPS[entry.key]) for entry in entries])
    found = run_ranks(num_trainers + num_encoders, read_from_encoders, tmp_path, num_trainers)
    assert found == [alone] * num_trainers + [None] * num_encoders
    assert isinstance(reader.read(entries[3], CLIPS["3"]), CorruptSampleError)


def fail(rank: int, world_size: int, folder: Path, how: str) -> str | None:
    """Rank 1 encodes for rank 0. Returns the error of rank 0."""
    if rank == 1:
        link = link_to(0, 0, ENCODER)
        dist.barrier()  # who leaves at once must not do so while the other is connecting
        if how == "the encoder fails":
            serve(make_reader(folder, FailingDecoder), [link])
        elif how == "other models":
            reader = make_reader(folder)
            reader.encoder.__dict__["visual_fingerprint"] = "other"
            serve(reader, [link])
        return None  # or leaves while it is asked
    link = EncoderLink(link_to(0, 0, TRAINER))
    dist.barrier()
    with pytest.raises((RuntimeError, UserError)) as caught:
        if how == "the encoder is gone":
            link.ask({"about": True})
        dataset = open_remote(folder, [link])
        dataset.read(dataset.entries[0])
    link.close()
    link.close()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("the encoder fails", "RuntimeError: on an encoder rank, MemoryError: no memory for frames"),
        ("other models", "UserError: vae.path, text_encoder.path: an encoder rank has other models there"),
        ("the encoder is gone", "RuntimeError: an encoder rank is gone"),
    ],
)
def test_what_goes_wrong_on_an_encoder_rank_fails_the_read(how, message, tmp_path):
    error, _ = run_ranks(2, fail, tmp_path, how, timeout=20)
    assert error.startswith(message)


def die(rank: int, world_size: int, folder: Path) -> None:
    if rank == 0:
        EncoderLink(link_to(0, 0, TRAINER)).ask({"about": True})
        os._exit(7)
    with pytest.raises(RuntimeError) as caught:
        serve(make_reader(folder), [link_to(0, 0, ENCODER)])
    (folder / "error").write_text(str(caught.value))


def test_a_trainer_that_has_died_ends_its_encoder(tmp_path):
    with pytest.raises(RankError, match="process died with exit code 7"):
        run_ranks(2, die, tmp_path, timeout=20)
    assert "onnection" in (tmp_path / "error").read_text()
