"""The table of `verify --encoder`, and that it would show a mistake."""

from dataclasses import replace

import pytest
import torch

from ttv_train import cli
from ttv_train.verify import encoder
from ttv_train.verify.encoder import EncoderRow, format_table, passed, verify_encoders
from ttv_train.verify.peak_memory import PeakMemory


@pytest.fixture(scope="module")
def rows() -> list[EncoderRow]:
    return verify_encoders([1, 2, 3], ["AutoencoderKLWan", "AutoencoderKLHunyuanVideo"])


def test_every_exact_mode_is_exact_and_sends_what_its_formula_says(rows):
    assert passed(rows)
    assert {(row.mode, row.degree) for row in rows} == {
        ("time", 1),
        ("time", 2),
        ("space", 1),
        ("space", 2),
        ("time", 3),
        ("space", 3),
        ("serial_chunks", 1),
        ("tiled", 1),
    }
    assert all(row.halo_bytes > 0 for row in rows if row.degree > 1)


def test_memory_per_rank_falls_with_the_ranks(rows):
    alone = {(row.vae, row.mode): row.peak_bytes for row in rows if row.degree == 1}
    shared = [row for row in rows if row.degree > 1]
    assert len(shared) == 8
    for row in shared:
        # 17 frames or latent frames and 12 rows; HunyuanVideo's tiles of 5 latent frames are 5, 8 and 4 frames of 17.
        assert 1 / row.degree <= row.largest_share < 1.42 / row.degree
        assert row.peak_bytes <= 1.15 * alone[row.vae, row.mode] * row.largest_share


def test_inexact_modes_are_named_with_their_psnr(rows):
    assert [row.is_exact for row in rows if row.mode == "tiled"] == [False, False]
    assert format_table(rows).count("inexact, ") == 2
    assert all(row.psnr_db > 0 for row in rows if row.mode == "tiled")


def test_a_difference_or_a_byte_too_many_fails(rows):
    row = next(row for row in rows if row.mode == "time" and row.degree == 2)
    for wrong in (replace(row, max_difference=2e-5), replace(row, halo_bytes=row.halo_bytes + 4)):
        assert not passed([*rows, wrong])
        assert "FAILED" in format_table([wrong])


def test_the_command_says_by_its_exit_code_whether_all_passed(rows, monkeypatch, capsys):
    def found(table):
        monkeypatch.setattr(encoder, "verify_encoders", lambda degrees: table)
        return cli.main(["verify", "--encoder", "--degree", "1", "2"])

    assert found(rows) == 0
    assert "AutoencoderKLWan" in capsys.readouterr().out
    assert found([replace(rows[0], max_difference=1.0)]) == 1


def test_peak_memory_counts_what_is_alive():
    outside = torch.zeros(1000)
    with PeakMemory() as memory:
        first = outside + 1
        view = first.view(10, 100)
        del first
        second = view * 2
        del view
        third = second[:10].clone()
    assert memory.peak_bytes == 2 * 4000
    assert third.shape == (10, 100)
