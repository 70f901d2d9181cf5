"""Which ranks of a job encode, and for whom."""

import pytest
import torch.distributed as dist

from ttv_train.config import ParallelConfig
from ttv_train.config_file import parse_config
from ttv_train.devices import get_backend
from ttv_train.errors import UserError
from ttv_train.parallel.encoder_ranks import linked, split_job


@pytest.mark.parametrize("num_trainers", range(1, 6))
@pytest.mark.parametrize("num_encoders", range(1, 6))
def test_everybody_has_a_partner_and_the_load_is_even(num_trainers, num_encoders):
    pairs = linked(num_trainers, num_encoders)
    for side, count in ((0, num_trainers), (1, num_encoders)):
        partners = [sum(pair[side] == rank for pair in pairs) for rank in range(count)]
        assert min(partners) >= 1
        assert max(partners) - min(partners) <= 1
    assert len(pairs) == max(num_trainers, num_encoders)


@pytest.mark.parametrize(
    ("num_ranks", "num_encoders", "degree", "message"),
    [
        (2, 2, 1, "latents.encoder_ranks 2 of 2 process"),
        (4, 3, 2, "multiple of vae.parallel.degree 2"),
        (4, 1, 1, "parallel.sequence.degree 2 does not divide the 3 process"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(num_ranks, num_encoders, degree, message, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(dist.HashStore(), 0, num_ranks)]))
    config = parse_config({"parallel": {"sequence": {"scheme": "ulysses", "degree": 2}}}).parallel
    with pytest.raises(UserError, match=message), split_job(get_backend("cpu"), config, num_encoders, degree):
        pass


def test_a_single_process_has_no_encoder_ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    message = "this is a single process"
    with pytest.raises(UserError, match=message), split_job(get_backend("cpu"), ParallelConfig(), 1, 1):
        pass


def test_encoder_ranks_belong_to_encoding_on_line():
    with pytest.raises(UserError, match="encoder_ranks 1 belongs to online: true"):
        parse_config({"latents": {"encoder_ranks": 1}})
