import pytest
import torch

from tests.latent_samples import MemoryDataset, make_entry
from tests.unit.data.test_collate import make_collator
from ttv_train.config import ValidationConfig
from ttv_train.errors import UserError
from ttv_train.validate import read_holdout, split_holdout, validation_batches


def entries_of_videos(videos: int, clips: int):
    return [
        make_entry(
            10 * video + clip,
            source_sha256=f"video-{video}",
            clip_index=clip,
            is_last_clip=clips > 1 and clip == clips - 1,
        )
        for video in range(videos)
        for clip in range(clips)
    ]


def test_held_out_videos_take_all_of_their_clips_along():
    entries = entries_of_videos(20, 3)
    config = ValidationConfig(holdout="videos", holdout_fraction=0.1)
    training, held_out = split_holdout(entries, config, seed=0)
    videos = {entry.source_sha256 for entry in held_out}
    assert len(videos) == 2
    assert len(held_out) == 6
    assert not videos & {entry.source_sha256 for entry in training}
    assert len(training) == 54
    assert split_holdout(entries, config, seed=0) == (training, held_out)


def test_last_clips_are_held_out_where_there_are_several():
    entries = [*entries_of_videos(3, 2), make_entry(99, is_last_clip=False)]
    training, held_out = split_holdout(entries, ValidationConfig(holdout="last_clips"), seed=0)
    assert [entry.clip_index for entry in held_out] == [1, 1, 1]
    assert len(training) == 4


def test_without_a_holdout_the_training_clips_are_validated():
    entries = entries_of_videos(3, 1)
    training, held_out = split_holdout(entries, ValidationConfig(holdout="none"), seed=0)
    assert training == held_out == entries


@pytest.mark.parametrize("holdout", ["none", "videos"])
def test_the_validation_set_is_capped(holdout):
    entries = entries_of_videos(30, 1)
    config = ValidationConfig(holdout=holdout, holdout_fraction=0.5, max_clips=4)
    _, held_out = split_holdout(entries, config, seed=1)
    assert len(held_out) == 4


def test_a_corrupt_validation_clip_is_reported_and_left_out():
    dataset = MemoryDataset([make_entry(number) for number in range(3)], corrupt=("sample-1",))
    reported = []
    samples = read_holdout(dataset, dataset.entries, lambda entry, reason: reported.append((entry.key, reason)))
    assert [sample.entry.key for sample in samples] == ["sample-0", "sample-2"]
    assert [key for key, _ in reported] == ["sample-1"]
    assert "flipped on purpose" in reported[0][1]


@pytest.mark.parametrize("entries", [[], [make_entry(1)]])
def test_nothing_to_validate_on_is_refused(entries):
    dataset = MemoryDataset(entries, corrupt=("sample-1",))
    with pytest.raises(UserError, match=r"validation\.holdout"):
        read_holdout(dataset, entries, lambda entry, reason: None)


def test_validation_batches_are_of_one_bucket_and_always_the_same():
    entries = [make_entry(number, bucket=(4, 32, 48) if number % 2 else (8, 32, 48)) for number in range(5)]
    dataset = MemoryDataset(entries)
    samples = read_holdout(dataset, entries, lambda entry, reason: None)
    first, second = (validation_batches(samples, make_collator(dataset, caption_dropout=0.0), 2) for _ in range(2))
    assert [batch.keys for batch in first] == [["sample-1", "sample-3"], ["sample-0", "sample-2"], ["sample-4"]]
    assert all(torch.equal(a.noise, b.noise) for a, b in zip(first, second, strict=True))
