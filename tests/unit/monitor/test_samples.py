import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttv_train.monitor.samples import SampledVideo, read_prompts, read_samples, step_folder, video_name, write_prompts


def add(folder, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    for row in rows:
        (folder / row.file).write_bytes(b"video")
    write_prompts(folder, rows)


@given(st.integers(0, 2000), st.text())
def test_names_are_safe_for_any_prompt(index, prompt):
    assert re.fullmatch(r"\d\d+-[a-z0-9]+(-[a-z0-9]+)*\.mp4", video_name(index, prompt))
    assert len(video_name(index, prompt)) < 64


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A fluffy, white dog!", "03-a-fluffy-white-dog.mp4"),
        ("Éclair à la crème", "03-eclair-a-la-creme.mp4"),
        ("../../etc/passwd", "03-etc-passwd.mp4"),
        ("", "03-prompt.mp4"),
        ("兎", "03-prompt.mp4"),
        ("x" * 300, f"03-{'x' * 48}.mp4"),
    ],
)
def test_names_tell_the_prompt(prompt, name):
    assert video_name(3, prompt) == name


def test_rows_come_back_by_step(tmp_path):
    dog = SampledVideo("00-dog.mp4", 'A "dog" <b> 犬', "key-1", "dog.mp4", "references/key-1.mp4")
    cat = SampledVideo("01-cat.mp4", "A cat", "key-2")
    add(step_folder(tmp_path, 200), dog, cat)
    add(step_folder(tmp_path, 0), dog)
    (tmp_path / "samples" / "step-x").mkdir()
    assert list(read_samples(tmp_path).items()) == [(0, [dog]), (200, [dog, cat])]


def test_a_second_call_keeps_other_videos_and_replaces_its_own(tmp_path):
    folder = step_folder(tmp_path, 5)
    add(folder, SampledVideo("00-dog.mp4", "old", "a"), SampledVideo("01-cat.mp4", "A cat", "b"))
    add(folder, SampledVideo("00-dog.mp4", "new", "c"))
    assert [(row.file, row.prompt) for row in read_prompts(folder)] == [("00-dog.mp4", "new"), ("01-cat.mp4", "A cat")]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "{}",
        "[1]",
        json.dumps([{"file": "absent.mp4", "prompt": "p", "key": "k"}]),
        json.dumps([{"file": "../outside.mp4", "prompt": "p", "key": "k"}]),
        json.dumps([{"file": "a.mp4", "prompt": None, "key": "k"}]),
        json.dumps([{"file": "a.mp4", "prompt": "p", "key": "k", "reference": 3}]),
    ],
)
def test_damaged_rows_are_left_out(tmp_path, content):
    folder = step_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    (folder / "a.mp4").write_bytes(b"video")
    (tmp_path / "samples" / "outside.mp4").write_bytes(b"video")
    (folder / "prompts.json").write_text(content)
    assert read_prompts(folder) == []
