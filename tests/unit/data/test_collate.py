import pytest
import torch

from tests.latent_samples import MemoryDataset, make_entry
from ttv_train.data.collate import Collator, pad_prompts


def make_collator(dataset, **fields) -> Collator:
    values = {
        "seed": 0,
        "normalization": dataset.normalization,
        "null_prompt": dataset.null_prompt(),
        "caption_dropout": 0.3,
        "max_text_tokens": 4,
        "num_padding_frames": lambda frames: 0,
    }
    return Collator(**(values | fields))


def tensors(batch):
    return [batch.latents, batch.noise, batch.uniform, batch.prompt_embeds, batch.prompt_mask, batch.fps]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batching_does_not_change_a_sample(size):
    dataset = MemoryDataset([make_entry(i) for i in range(6)], logvar=-1.0)
    collate = make_collator(dataset)
    samples = [dataset.read(entry) for entry in dataset.entries]
    whole = collate(samples, step=5, slots=range(6))
    parts = [collate(samples[i : i + size], step=5, slots=range(i, i + size)) for i in range(0, 6, size)]
    for together, *pieces in zip(tensors(whole), *map(tensors, parts), strict=True):
        assert torch.equal(together, torch.cat(pieces))


def test_the_same_sample_in_two_slots_or_steps_is_noised_differently():
    dataset = MemoryDataset([make_entry(0)])
    collate = make_collator(dataset)
    sample = dataset.read(dataset.entries[0])
    batch = collate([sample, sample], step=0, slots=[0, 1])
    later = collate([sample], step=1, slots=[0])
    assert not torch.equal(batch.noise[0], batch.noise[1])
    assert not torch.equal(batch.noise[:1], later.noise)
    assert torch.equal(batch.latents[0], batch.latents[1])
    assert len({*batch.uniform.tolist(), *later.uniform.tolist()}) == 3


def test_latents_are_normalized_once_and_the_posterior_is_sampled_anew():
    entry = make_entry(0)
    plain, variational = MemoryDataset([entry]), MemoryDataset([entry], logvar=0.0)
    sample = plain.read(entry)
    assert torch.allclose(make_collator(plain)([sample], 0, [0]).latents[0], (sample.mean - 1) * 2)
    draws = [make_collator(variational)([variational.read(entry)], step, [0]).latents for step in (0, 1)]
    deviations = [draw[0] / 2 + 1 - sample.mean for draw in draws]
    assert not torch.equal(*draws)
    assert 0.7 < float(torch.cat(deviations).std()) < 1.3


def test_captions_are_dropped_at_the_configured_rate():
    dataset = MemoryDataset([make_entry(i) for i in range(400)])
    samples = [dataset.read(entry) for entry in dataset.entries]
    batch = make_collator(dataset)(samples, 0, range(400))
    dropped = (batch.prompt_embeds[:, 0] == -1).all(-1)
    assert 0.22 < float(dropped.float().mean()) < 0.38
    assert batch.prompt_mask[dropped].sum(1).eq(1).all()
    assert batch.prompt_mask[~dropped].sum(1).eq(3).all()


def test_a_null_prompt_of_the_model_keeps_the_captions_mask():
    dataset = MemoryDataset([make_entry(0)])
    collate = make_collator(dataset, caption_dropout=1.0, null_prompt=(torch.full((4, 5), 7.0), None))
    batch = collate([dataset.read(dataset.entries[0])], 0, [0])
    assert batch.prompt_embeds.eq(7).all()
    assert batch.prompt_mask.tolist() == [[True, True, True, False]]


def test_frames_are_padded_in_front_with_the_first():
    dataset = MemoryDataset([make_entry(0)])
    sample = dataset.read(dataset.entries[0])
    plain = make_collator(dataset)([sample], 0, [0]).latents
    padded = make_collator(dataset, num_padding_frames=lambda frames: frames - 1)([sample], 0, [0])
    assert torch.equal(padded.latents, torch.cat([plain[:, :, :1], plain], dim=2))
    assert padded.noise.shape == padded.latents.shape


def test_prompts_are_padded_with_zeros_and_masked():
    embeds, mask = pad_prompts([(torch.ones(2, 5), torch.tensor([True, False]))], 4)
    assert embeds.shape == (1, 4, 5)
    assert embeds[0, :, 0].tolist() == [1, 1, 0, 0]
    assert mask.tolist() == [[True, False, False, False]]
