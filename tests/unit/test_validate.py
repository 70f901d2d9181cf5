import pytest

from tests.latent_samples import make_entry
from ttv_train.config import ValidationConfig
from ttv_train.validate import split_holdout


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
