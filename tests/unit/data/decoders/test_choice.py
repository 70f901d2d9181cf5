"""Which decoder is used, and what becomes of one that cannot be."""

import os

import pytest

from tests.video_files import source_of, write_video
from ttv_train.config import DatasetConfig
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.decoders import DECODERS, choose_decoder
from ttv_train.data.frame_index import build_index
from ttv_train.data.probe import BadVideoError, VideoFile, VideoLimits
from ttv_train.errors import UserError


def test_a_decoder_that_gets_a_file_wrong_is_refused_by_name(tmp_path):
    path = write_video(tmp_path / "edit.mp4", hidden_frames=7, options={"g": "100", "sc_threshold": "0"})
    with VideoFile(str(path), VideoLimits(10**8, 3600)) as video:
        index = build_index(video)
    assert index.has_hidden_frames
    with pytest.raises(BadVideoError, match=r"dataset\.decoder decord: it shows frames that an edit list hides"):
        choose_decoder("decord", index)
    assert choose_decoder("auto", index).refusal(index) is None


def test_auto_takes_the_first_that_is_installed_and_right(tmp_path, monkeypatch):
    plain = write_video(tmp_path / "plain.mp4", options={"g": "8"})
    with VideoFile(str(plain), VideoLimits(10**8, 3600)) as video:
        index = build_index(video)
    names = [decoder.name for decoder in DECODERS.values() if decoder.refusal(index) is None]
    assert names == list(DECODERS)
    assert choose_decoder("auto", index).name == names[0]
    monkeypatch.setattr("ttv_train.data.decoders.is_installed", lambda name: name == "decord")
    assert choose_decoder("auto", index).name == "decord"


def test_a_library_that_does_not_load_is_an_error_of_the_run_and_not_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "decord.py").write_text("raise ImportError('libavcodec.so.59 is missing')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    path = write_video(tmp_path / "plain.mp4")
    with (
        ClipDecoder(DatasetConfig(decoder="decord")) as decoder,
        pytest.raises(UserError, match=r"dataset\.decoder decord: decord2 cannot be used: libavcodec.* is missing"),
    ):
        decoder.probe(source_of(path))
