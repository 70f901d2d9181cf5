import pytest

from tests.latent_samples import make_entry
from ttv_train.config import TrainingConfig
from ttv_train.data.batching import batch_sizes, latent_positions
from ttv_train.errors import UserError

IMAGE, SHORT, LONG = (1, 32, 48), (9, 32, 48), (33, 64, 96)
# Latents of 1, 3 and 9 frames of 24, 24 and 96 positions.
ENTRIES = [
    make_entry(0, bucket=IMAGE, latent_shape=(3, 1, 4, 6)),
    make_entry(1, bucket=SHORT, latent_shape=(3, 3, 4, 6)),
    make_entry(2, bucket=LONG, latent_shape=(3, 9, 8, 12)),
]


def test_every_bucket_has_the_global_batch_size():
    assert batch_sizes(latent_positions(ENTRIES), TrainingConfig(global_batch_size=6), 3) == {
        IMAGE: 6,
        SHORT: 6,
        LONG: 6,
    }


def test_as_many_samples_as_fit_the_token_budget():
    config = TrainingConfig(global_batch_size=4, tokens_per_batch=1000)
    # 1000 / 24 = 41, 1000 / 72 = 13; one of 864 is more than fits four times.
    assert batch_sizes(latent_positions(ENTRIES), config, 2) == {IMAGE: 40, SHORT: 12, LONG: 4}


def test_a_named_bucket_has_its_own():
    config = TrainingConfig(global_batch_size=2, tokens_per_batch=1000, bucket_batch_sizes={"1x32x48": 6})
    assert batch_sizes(latent_positions(ENTRIES), config, 2) == {IMAGE: 6, SHORT: 12, LONG: 2}


def test_a_batch_that_cannot_be_dealt_is_refused():
    with pytest.raises(UserError, match=r"training\.global_batch_size 4 cannot be dealt to 3"):
        batch_sizes(latent_positions(ENTRIES), TrainingConfig(global_batch_size=4), 3)
    config = TrainingConfig(global_batch_size=4, bucket_batch_sizes={"9x32x48": 3})
    with pytest.raises(UserError, match=r"training\.bucket_batch_sizes 3 of bucket 9x32x48 cannot be dealt to 2"):
        batch_sizes(latent_positions(ENTRIES), config, 2)
