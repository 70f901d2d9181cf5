import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.run_folders import HOSTILE_CAPTIONS, write_run
from ttv_train import report
from ttv_train.errors import UserError
from ttv_train.monitor.samples import SampledVideo, step_folder, write_prompts
from ttv_train.monitor.video import write_video
from ttv_train.report import write_report


class Page(HTMLParser):
    """Elements with their attributes, and the text between them."""

    def __init__(self, path):
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.elements, self.text = [], ""
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.text += text

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(write_report(write_run(tmp_path_factory.mktemp("runs") / "demo", steps=20, validate_every=10)))


def test_the_page_needs_nothing_else(page):
    loaded = [value for _, attributes in page.elements for key, value in attributes.items() if key in ("src", "href")]
    assert loaded
    assert all(value.startswith(("data:", "#")) for value in loaded)
    assert not re.search(r"https?://|@import|url\(", page.html)


def test_captions_and_names_are_text(page):
    for caption in [*HOSTILE_CAPTIONS, "<b>dog</b>.mp4", "broken/<script>alert(1)</script>.mp4", "runs/<demo>"]:
        assert caption in page.text
    assert len(page.all("script")) == 1
    assert page.all("img") == []
    assert not [key for _, attributes in page.elements for key in attributes if key.startswith("on")]


def test_only_its_own_script_may_run(page):
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]+';", policy)


def test_figures_of_the_run_are_shown(page):
    for text in (
        "finished, 20 steps",
        "Validation loss fell from 0.7",
        "ulysses, degree 2",
        "775 MiB",
        "2 quarantined",
    ):
        assert text in page.text
    for title in (
        "Loss",
        "Validation loss by noise level",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Seconds per step",
    ):
        assert title in [attributes.get("aria-label") for attributes in page.all("div")]
    assert "attention" in page.text
    assert "6 MiB" in page.text
    assert "moov atom not found" in page.text
    assert "global_batch_size: 6" in page.text
    assert "2.13.0+cpu" in page.text
    assert "1 of 20 recorded steps" in page.text


def test_videos_are_embedded_beside_their_clip_over_training(page):
    videos = page.all("video")
    assert all(video["src"].startswith("data:video/mp4;base64,") for video in videos)
    assert all({"controls", "muted", "loop", "playsinline"} <= set(video) for video in videos)
    labels = [video["aria-label"] for video in videos]
    followed = ["the clip itself", "step 0", "step 10", "step 20"]
    assert labels == 2 * followed + 2 * ["the clip itself", "step 20"]


def test_buckets_count_the_samples_trained_on(page):
    assert re.search(r"8x96x160\s*84\s*70\.0%", page.text)
    assert re.search(r"8x128x128\s*36\s*30\.0%", page.text)


def test_a_run_that_has_just_begun_says_what_is_missing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    page = Page(write_report(tmp_path))
    for text in (
        "No videos sampled yet",
        "No validation yet",
        "No training step recorded yet",
        "No step has been timed yet",
        "No batch recorded yet",
        "None: every file was used",
        "No sequence-parallel exchange",
        "config.resolved.yaml is not in the run folder",
        "step 0",
    ):
        assert text in page.text


def test_damaged_parts_are_left_out_and_named(tmp_path):
    write_run(tmp_path / "run", steps=4, validate_every=2)
    run = tmp_path / "run"
    (run / "summary.json").write_text("{")
    (run / "environment.json").write_text("[1]")
    (run / "config.resolved.yaml").write_text("a: [")
    row = b'{"name": "\xff.mp4", "reason": "zero bytes", "stage": "probe"}'
    (run / "quarantine.jsonl").write_bytes(row + b'\n{"name": "a.mp4"}\nnot json\n[]\n{"na')
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 5, "kind": "train", "loss": "text", "bucket": 3, "step_seconds": 1, "communication": []}\n'
        )
        file.write('{"step": 6, "kind": "train", "loss": NaN, "step_seconds": {"forward": null}}\n')
        file.write('{"step": 6, "kind": "validation", "loss": true, "loss_by_noise_level": [1]}\n{"step": 7, "ki')
    page = Page(write_report(run))
    assert "summary.json is damaged and left out." in page.text
    assert "environment.json is damaged and left out." in page.text
    assert "config.resolved.yaml is not valid YAML." in page.text
    assert "step 6" in page.text
    assert "�.mp4" in page.text


def test_a_prompt_with_a_lone_surrogate_does_not_break_the_page(tmp_path):
    folder = step_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    write_video(folder / "a.mp4", np.zeros((2, 16, 16, 3), np.uint8), fps=8)
    (folder / "prompts.json").write_text(json.dumps([{"file": "a.mp4", "prompt": "bad \ud800 text", "key": "k"}]))
    assert "bad \\ud800 text" in Page(write_report(tmp_path)).text


def test_at_most_six_steps_of_a_prompt_are_shown(tmp_path):
    for step in range(0, 1000, 50):
        folder = step_folder(tmp_path, step)
        folder.mkdir(parents=True)
        (folder / "a.mp4").write_bytes(b"video")
        write_prompts(folder, [SampledVideo("a.mp4", "A dog", "key")])
    labels = [video["aria-label"] for video in Page(write_report(tmp_path)).all("video")]
    assert labels == ["step 0", "step 200", "step 400", "step 550", "step 750", "step 950"]


def test_videos_beyond_the_budget_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "EMBEDDED_BYTES", 10)
    folder = step_folder(tmp_path, 3)
    folder.mkdir(parents=True)
    for name, size in (("a.mp4", 6), ("b.mp4", 6), ("c.mp4", 4)):
        (folder / name).write_bytes(b"x" * size)
    write_prompts(folder, [SampledVideo(name, f"prompt {name}", name) for name in ("a.mp4", "b.mp4", "c.mp4")])
    page = Page(write_report(tmp_path))
    assert len(page.all("video")) == 2
    assert re.search(r"not embedded:\s*b\.mp4", page.text)


def test_files_outside_the_run_folder_are_not_embedded(tmp_path):
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(b"secret")
    run = tmp_path / "run"
    folder = step_folder(run, 0)
    folder.mkdir(parents=True)
    (folder / "a.mp4").symlink_to(secret)
    write_prompts(folder, [SampledVideo("a.mp4", "A dog", "key", reference="../secret.mp4")])
    assert Page(write_report(run)).all("video") == []


def test_the_report_replaces_the_last_one_and_leaves_no_other_file(tmp_path):
    run = write_run(tmp_path / "run", steps=2, validate_every=1)
    before = {path.name for path in run.iterdir()}
    first = write_report(run)
    assert write_report(run) == first == run / "report.html"
    assert {path.name for path in run.iterdir()} == before | {"report.html"}


@pytest.mark.parametrize("name", ["absent", "."])
def test_what_is_no_run_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="give the output_dir of a run"):
        write_report(tmp_path / name)


def test_the_storage_section_shows_where_the_bytes_came_from(page):
    for text in ("read from alluxio", "3 GiB", "93.8%", "errors: http_503", "errors: <i>", "1.50 s"):
        assert text in page.text
    assert "read from under_store" not in page.text
