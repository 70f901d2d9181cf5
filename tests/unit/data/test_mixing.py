import pytest

from tests.latent_samples import MemoryDataset, make_entry
from ttv_train.data.mixing import MixedDataset
from ttv_train.errors import UserError


def make_store(path, numbers, encoders=("vae", "text"), **options):
    store = MemoryDataset([make_entry(number) for number in numbers], **options)
    store.path, store.encoders = path, encoders
    return store


def test_samples_are_read_from_their_own_store():
    stores = [make_store("a", range(3)), make_store("b", range(2, 6))]
    mixed = MixedDataset(stores)
    assert [entry.key for entry in mixed.entries] == [f"sample-{number}" for number in range(6)]
    assert [mixed.source_of(entry) for entry in mixed.entries] == [0, 0, 0, 1, 1, 1]
    for entry in mixed.entries:
        assert mixed.read(entry).entry is entry
    assert [store.reads for store in stores] == [[f"sample-{n}" for n in (0, 1, 2)], [f"sample-{n}" for n in (3, 4, 5)]]


def test_stores_of_different_encoders_are_not_mixed():
    with pytest.raises(UserError, match=r"latents\.sources: a and b were encoded with different vae or text_encoder"):
        MixedDataset([make_store("a", [0]), make_store("b", [1], encoders=("vae", "another"))])


def test_a_source_that_adds_nothing_is_refused():
    with pytest.raises(UserError, match=r"latents\.sources b: earlier sources hold every sample"):
        MixedDataset([make_store("a", range(3)), make_store("b", range(1, 3))])
