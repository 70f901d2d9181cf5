import json
import os

import pytest

from ttv_train.data.formats import MAX_CAPTION_BYTES, RejectedSource, VideoSource, read_dataset
from ttv_train.errors import UserError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    return folder


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"video")


def write_jsonl(folder, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    (folder / "metadata.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def captions(folder):
    sources, rejected = read_dataset(folder)
    assert all(source.path == folder.resolve() / source.name for source in sources)
    return {source.name: source.caption for source in sources}, {row.name: row.reason for row in rejected}


@pytest.mark.parametrize("column", ["text", "caption", "prompt"])
def test_metadata_jsonl(folder, column):
    touch(folder, "a.mp4", "sub/b.webm")
    write_jsonl(
        folder, {"file_name": "a.mp4", column: " A cat. "}, b"", {column: "A dog.", "file_name": "./sub/b.webm"}
    )
    assert captions(folder) == ({"a.mp4": "A cat.", "sub/b.webm": "A dog."}, {})


@pytest.mark.parametrize("column", ["text", "caption", "prompt"])
def test_metadata_csv(folder, column):
    touch(folder, "a.mp4", "b.mp4", "c.mp4")
    rows = ['a.mp4,3,"A cat, a dog\nand a ""bird""."\r', "\r", "b.mp4,,Plain.", "c.mp4,,Dogs, 2."]
    (folder / "metadata.csv").write_bytes("\n".join([f"\ufefffile_name,width,{column}\r", *rows]).encode())
    good, rejected = captions(folder)
    assert good == {"a.mp4": 'A cat, a dog\nand a "bird".', "b.mp4": "Plain."}
    assert rejected == {"c.mp4": "4 columns where the header has 3; quote captions with commas"}


def test_text_files_beside_the_videos(folder):
    touch(folder, "a.mp4", "one/same.mp4", "two/same.mkv", "c.mp4")
    (folder / "a.txt").write_text("\ufeffA cat.\n")
    (folder / "one/same.txt").write_text("One.")
    (folder / "two/same.txt").write_text("Two.")
    (folder / "notes.txt").write_text("To do.")
    assert captions(folder) == (
        {"a.mp4": "A cat.", "one/same.mp4": "One.", "two/same.mkv": "Two."},
        {"c.mp4": "missing caption"},
    )


def test_videos_and_prompts(folder):
    touch(folder, "videos/a.mp4", "videos/b.mp4")
    (folder / "videos.txt").write_bytes(b"videos/a.mp4\r\nvideos/b.mp4\r\n\r\n")
    (folder / "prompts.txt").write_bytes("A \u2028 cat.\nA dog.\n".encode())
    assert captions(folder) == ({"videos/a.mp4": "A \u2028 cat.", "videos/b.mp4": "A dog."}, {})
    (folder / "prompts.txt").write_text("A cat.\n")
    with pytest.raises(UserError, match=r"videos\.txt has 2 lines and .*prompts\.txt has 1; "):
        read_dataset(folder)


def test_sources_are_in_the_order_of_the_rows(folder):
    touch(folder, "a.mp4", "b.mp4", "c.mp4")
    write_jsonl(folder, *({"file_name": f"{name}.mp4", "text": name} for name in "cab"))
    sources, rejected = read_dataset(folder)
    assert sources[0] == VideoSource(folder.resolve() / "c.mp4", "c.mp4", "c")
    assert [source.name for source in sources] == ["c.mp4", "a.mp4", "b.mp4"]
    assert rejected == []


def test_a_folder_without_captions_or_with_two_layouts_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_dataset(tmp_path / "absent")
    touch(folder, "a.mp4")
    (folder / "videos.txt").write_text("a.mp4\n")
    with pytest.raises(UserError, match=r"no captions; give it a metadata\.jsonl, .*\.txt file beside each video"):
        read_dataset(folder)
    (folder / "prompts.txt").write_text("A cat.\n")
    (folder / "a.txt").write_text("A cat.")
    write_jsonl(folder, {"file_name": "a.mp4", "text": "A cat."})
    (folder / "metadata.csv").write_text("file_name,text\na.mp4,A cat.\n")
    both = r"metadata\.jsonl, metadata\.csv, videos\.txt with prompts\.txt, \.txt files beside the videos; keep one"
    with pytest.raises(UserError, match=both):
        read_dataset(folder)


def test_rows_that_are_no_clips_are_rejected_with_the_reason(folder):
    touch(folder, *(f"{name}.mp4" for name in "abcdefghijk"))
    (folder / "l.mp4").mkdir()
    write_jsonl(
        folder,
        {"file_name": "a.mp4", "text": "A cat."},
        {"file_name": "b.mp4"},
        {"file_name": "c.mp4", "text": " \n"},
        b'{"file_name": "d.mp4", "text": "caf\xe9"}',
        {"file_name": "e.mp4", "text": "A\0cat."},
        {"file_name": "f.mp4", "text": "x" * 1_000_000},
        {"file_name": "g.mp4", "text": 3},
        {"file_name": "h.mp4", "text": "\ud800"},
        {"file_name": "a.mp4", "text": "A dog."},
        {"file_name": "absent.mp4", "text": "A cat."},
        {"file_name": "l.mp4", "text": "A folder."},
        {"file_name": "x" * 5000, "text": "A long name."},
        {"file_name": "nul\0.mp4", "text": "A cat."},
        {"text": "A cat."},
        {"file_name": 4, "text": "A cat."},
        b'{"file_name": "i.mp4", "text": "A cat."',
        b"[" * 100_000,
        b'"i.mp4"',
        b"\xff\xfe{\0",
    )
    sources, rejected = read_dataset(folder)
    assert [(source.name, source.caption) for source in sources] == [("a.mp4", "A cat.")]
    assert rejected == [
        RejectedSource("b.mp4", "missing caption"),
        RejectedSource("c.mp4", "empty caption"),
        RejectedSource("d.mp4", "the caption is not valid UTF-8"),
        RejectedSource("e.mp4", "NUL byte in the caption"),
        RejectedSource("f.mp4", f"the caption has 1000000 bytes, more than {MAX_CAPTION_BYTES}"),
        RejectedSource("g.mp4", "the caption is not text"),
        RejectedSource("h.mp4", "the caption is not valid UTF-8"),
        RejectedSource("a.mp4", "duplicate row"),
        RejectedSource("absent.mp4", "no such file"),
        RejectedSource("l.mp4", "not a regular file"),
        RejectedSource("x" * 5000, "cannot be read: File name too long"),
        RejectedSource("nul\0.mp4", "NUL byte in the file name"),
        RejectedSource("metadata.jsonl:14", "no file_name"),
        RejectedSource("metadata.jsonl:15", "no file_name"),
        RejectedSource("metadata.jsonl:16", "malformed JSON: Expecting ',' delimiter at column 40"),
        RejectedSource("metadata.jsonl:17", "malformed JSON: a number too long or brackets too deep"),
        RejectedSource("metadata.jsonl:18", "not a JSON object"),
        RejectedSource("metadata.jsonl:19", "malformed JSON: Expecting value at column 1"),
        *(RejectedSource(f"{name}.mp4", "no caption row") for name in "ijk"),
    ]


def test_rows_of_a_csv_file_that_are_no_clips(folder):
    touch(folder, "a.mp4", "b.mp4", "c.mp4", "d.mp4", "e.mp4")
    big = b"x" * 1_000_000
    (folder / "metadata.csv").write_bytes(
        b"text,file_name\nA cat.,a.mp4\n,b.mp4\nA\0cat.,c.mp4\ncaf\xe9,d.mp4\n" + big + b',e.mp4\nlost\n"A"x,f.mp4\nA.,'
    )
    assert captions(folder) == (
        {"a.mp4": "A cat."},
        {
            "b.mp4": "empty caption",
            "c.mp4": "NUL byte in the caption",
            "d.mp4": "the caption is not valid UTF-8",
            "e.mp4": f"the caption has 1000000 bytes, more than {MAX_CAPTION_BYTES}",
            "metadata.csv:7": "no file_name",
            "metadata.csv:8": "malformed CSV: ',' expected after '\"'",
            "metadata.csv:9": "no file_name",
        },
    )


def test_nothing_outside_the_folder_is_followed(folder, tmp_path):
    outside = tmp_path / "outside"
    touch(outside, "secret.mp4", "folder/secret.mp4")
    touch(folder, "inside.mp4", "sub/x.mp4")
    (folder / "link.mp4").symlink_to(outside / "secret.mp4")
    (folder / "linked").symlink_to(outside / "folder")
    (folder / "inner.mp4").symlink_to("inside.mp4")
    (folder / "loop.mp4").symlink_to("loop.mp4")
    os.mkfifo(folder / "pipe.mp4")
    names = [
        "../outside/secret.mp4",
        str(outside / "secret.mp4"),
        "sub/../../outside/secret.mp4",
        "link.mp4",
        "linked/secret.mp4",
    ]
    write_jsonl(folder, *({"file_name": name, "text": "A."} for name in [*names, "inner.mp4", "loop.mp4", "pipe.mp4"]))
    sources, rejected = read_dataset(folder)
    assert [(source.name, source.path) for source in sources] == [("inner.mp4", folder.resolve() / "inside.mp4")]
    reasons = [(row.name, row.reason) for row in rejected]
    assert [reason for _, reason in reasons[: len(names)]] == ["path outside the dataset folder"] * len(names)
    assert reasons[len(names)][0] == "loop.mp4"
    assert reasons[len(names) + 1 :] == [
        ("pipe.mp4", "not a regular file"),
        ("inside.mp4", "no caption row"),
        ("sub/x.mp4", "no caption row"),
    ]


def test_caption_files_outside_the_folder_are_not_read(folder, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    touch(folder, "a.mp4", "b.mp4")
    (folder / "a.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "b.txt").write_text("A cat.")
    assert captions(folder) == ({"b.mp4": "A cat."}, {"a.mp4": "the caption file is a link out of the dataset folder"})
    (folder / "metadata.jsonl").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match="link out of the dataset folder"):
        read_dataset(folder)


def test_caption_files_of_any_content(folder):
    touch(folder, *(f"{name}.mp4" for name in "abcde"))
    (folder / "a.txt").write_bytes(b"caf\xe9")
    (folder / "b.txt").write_bytes(b"x" * (MAX_CAPTION_BYTES + 1))
    (folder / "c.txt").write_bytes(b"x" * 1_000_000)
    (folder / "d.txt").write_bytes("<b>A cat.</b>".encode("utf-16"))
    (folder / "e.txt").write_bytes(b"<script>alert(1)</script>")
    assert captions(folder) == (
        {"e.mp4": "<script>alert(1)</script>"},
        {
            "a.mp4": "the caption is not valid UTF-8",
            "b.mp4": f"the caption has {MAX_CAPTION_BYTES + 1} bytes, more than {MAX_CAPTION_BYTES}",
            "c.mp4": f"the caption file has more than {4 * MAX_CAPTION_BYTES} bytes",
            "d.mp4": "the caption is not valid UTF-8",
        },
    )


def test_file_names_of_any_bytes(folder):
    names = ["two words.mp4", "new\nline.mp4", "emoji 🎬.mp4", os.fsdecode(b"latin \xe9.mp4")]
    touch(folder, *names)
    rows = [{"file_name": name, "text": "A."} for name in names[:-1]]
    write_jsonl(folder, *rows, b'{"file_name": "latin \xe9.mp4", "text": "A."}')
    good, rejected = captions(folder)
    assert list(good) == names
    assert rejected == {}


def test_hidden_files_and_upper_case_suffixes(folder):
    touch(folder, "A.MP4", "._A.MP4", ".cache/b.mp4", "notes.md")
    write_jsonl(folder, {"file_name": "x.mp4", "text": "A."})
    assert captions(folder) == ({}, {"x.mp4": "no such file", "A.MP4": "no caption row"})
