"""The encoding job with groups of ranks that share each clip."""

from pathlib import Path

import pytest
import torch

from tests.encode_parts import FakeDecoder, fake_list_clips, make_clip, make_config, stored_bytes
from tests.harness import RankError, run_ranks
from ttv_train import encode
from ttv_train.data import keyed_clips
from ttv_train.encode import EncodeSummary


def encode_clips(rank: int, world_size: int, folder: Path, parallel: dict) -> EncodeSummary:
    encode.ClipDecoder, keyed_clips.list_clips = (
        FakeDecoder,
        fake_list_clips([make_clip(number) for number in range(6)]),
    )
    summary = encode.encode_dataset(make_config(folder, vae={"parallel": parallel}), torch.device("cpu"))
    assert summary is not None
    return summary


@pytest.mark.parametrize("mode", ["time", "space"])
def test_groups_of_two_store_what_one_process_stores(mode, tmp_path):
    run_ranks(1, encode_clips, tmp_path / "alone", {})
    summaries = run_ranks(4, encode_clips, tmp_path / "groups", {"mode": mode, "degree": 2})
    assert {(summary.encoded, summary.frames) for summary in summaries} == {(6, 24)}
    found, expected = (stored_bytes(make_config(tmp_path / name)) for name in ("groups", "alone"))
    assert {name: data for name, data in found.items() if name.endswith(".tar")} == {
        name: data for name, data in expected.items() if name.endswith(".tar")
    }


def test_a_degree_that_does_not_divide_the_ranks_is_refused(tmp_path):
    with pytest.raises(RankError, match=r"vae.parallel.degree 2 does not divide the 3 process"):
        run_ranks(3, encode_clips, tmp_path, {"mode": "time", "degree": 2})
