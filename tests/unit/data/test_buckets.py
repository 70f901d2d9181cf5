from collections import Counter
from fractions import Fraction

import pytest

from ttv_train.data.buckets import NoBucketError, choose_bucket
from ttv_train.data.probe import VideoInfo

FPS = Fraction(8)


def make_info(width=1280, height=720, seconds=10, frame_rate=25):
    num_frames = seconds * frame_rate + 1
    return VideoInfo("mov", "h264", width, height, num_frames, Fraction(seconds), Fraction(1, 12800))


def test_the_nearest_aspect_ratio_is_chosen():
    buckets = [(9, 480, 832), (9, 832, 480), (9, 640, 640)]
    assert choose_bucket(make_info(1920, 1080), buckets, FPS) == (9, 480, 832)
    assert choose_bucket(make_info(1080, 1920), buckets, FPS) == (9, 832, 480)
    assert choose_bucket(make_info(1000, 900), buckets, FPS) == (9, 640, 640)


def test_only_buckets_that_the_video_fills_are_considered():
    buckets = [(49, 480, 832), (9, 640, 640)]
    assert choose_bucket(make_info(seconds=6), buckets, FPS) == (49, 480, 832)  # frames at 0, 1/8, ..., 6 s
    assert choose_bucket(make_info(seconds=5), buckets, FPS) == (9, 640, 640)


def test_upscaling_is_avoided_when_aspect_ratios_tie():
    buckets = [(9, 1080, 1920), (9, 480, 832), (9, 720, 1280)]
    assert choose_bucket(make_info(1280, 720), buckets, FPS) == (9, 720, 1280)
    assert choose_bucket(make_info(1000, 562), buckets, FPS) == (9, 480, 832)
    assert choose_bucket(make_info(320, 180), buckets, FPS) == (9, 480, 832)
    assert choose_bucket(make_info(320, 180), [(9, 480, 640), (9, 1080, 1920)], FPS) == (9, 1080, 1920)  # not a tie


def test_the_largest_of_the_buckets_that_need_no_upscaling_is_chosen():
    assert choose_bucket(make_info(), [(9, 480, 832), (49, 480, 832), (17, 480, 832)], FPS) == (49, 480, 832)
    assert choose_bucket(make_info(), [(17, 720, 1280), (81, 480, 832)], FPS) == (81, 480, 832)


def test_a_short_video_is_refused_with_the_numbers():
    info = VideoInfo("mov", "h264", 320, 180, 13, Fraction(1, 2), Fraction(1, 12800))
    with pytest.raises(NoBucketError, match=r"^too short: 5 frames at 8 fps, the smallest bucket needs 9$"):
        choose_bucket(info, [(17, 96, 160), (9, 96, 160)], FPS)


def test_a_still_picture_fills_a_bucket_of_one_frame_only():
    still = VideoInfo("mov", "h264", 320, 180, 1, Fraction(0), Fraction(1, 12800))
    assert choose_bucket(still, [(1, 96, 160), (9, 96, 160)], FPS) == (1, 96, 160)
    with pytest.raises(NoBucketError, match="1 frame at 8 fps"):
        choose_bucket(still, [(9, 96, 160)], FPS)


def test_frames_must_not_repeat():
    assert choose_bucket(make_info(frame_rate=6), [(9, 96, 160)], FPS) == (9, 96, 160)
    with pytest.raises(NoBucketError, match=r"frame rate 5 is too low: frames would repeat at dataset\.fps 8"):
        choose_bucket(make_info(frame_rate=5), [(9, 96, 160)], FPS)


def test_a_shape_far_from_every_bucket_is_refused():
    with pytest.raises(NoBucketError, match="2000x20 pixels: no bucket is near this shape"):
        choose_bucket(make_info(2000, 20), [(9, 96, 160)], FPS)


def test_the_number_of_samples_counts_those_up_to_the_last_frame():
    info = VideoInfo("mov", "h264", 320, 180, 25, Fraction(24, 25), Fraction(1, 12800))
    assert info.num_samples(Fraction(25)) == 25
    assert info.num_samples(Fraction(8)) == 8
    # 30 fps in milliseconds: the last of ten frames is stamped 0.3 s, the second of two 0.033 s.
    matroska = VideoInfo("matroska", "vp9", 320, 180, 2, Fraction(33, 1000), Fraction(1, 1000))
    assert matroska.num_samples(Fraction(30)) == 2


def test_a_keep_probability_leaves_the_others_to_the_next_bucket_of_the_shape():
    large, small, other = (8, 480, 720), (8, 240, 360), (8, 720, 480)
    buckets, fps = [large, small, other], Fraction(8)
    info = make_info(720, 480)

    def chosen(keep):
        return Counter(choose_bucket(info, buckets, fps, keep, f"video {number}") for number in range(400))

    assert chosen({}) == {large: 400}
    assert chosen({large: 0.0}) == {small: 400}
    some = chosen({large: 0.25})
    assert set(some) == {large, small}
    assert 70 < some[large] < 130
    assert chosen({large: 0.25}) == some
    with pytest.raises(NoBucketError, match=r"left out by dataset\.keep_probability"):
        choose_bucket(info, buckets, fps, {large: 0.0, small: 0.0}, "video")
