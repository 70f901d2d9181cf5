"""Every layout is found by itself and gives the same clips; hostile tables and tar files are refused, not followed."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.dataset_folders import CAPTIONS, LAYOUTS, NAMES, copy_videos, write_tar
from tests.video_files import SAMPLE
from ttv_train.config import DatasetConfig
from ttv_train.data.clips import list_clips
from ttv_train.data.decode import ClipDecoder
from ttv_train.data.formats import read_dataset
from ttv_train.errors import UserError


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_clips(tmp_path, layout):
    LAYOUTS[layout](tmp_path / "set")
    config = DatasetConfig(path=str(tmp_path / "set"), fps=8, buckets=["4x90x160"])
    clips, quarantined = list_clips(config, None)
    assert quarantined == []
    assert [clip.source.caption for clip in clips] == [CAPTIONS[name] for name in NAMES]
    with ClipDecoder(config) as decoder:
        whole = list_clips(config.model_copy(update={"path": str(SAMPLE)}), None)[0]
        expected = {clip.source_sha256: decoder.decode(clip) for clip in whole}
        for clip in clips:
            assert decoder.decode(clip).equal(expected[clip.source_sha256])


def test_a_caption_file_can_be_named_where_several_fit(tmp_path):
    copy_videos(tmp_path)
    for name, column in (("one.jsonl", "file_name"), ("two.jsonl", "video_path")):
        (tmp_path / name).write_text(json.dumps({column: NAMES[0], "text": name}) + "\n")
    (tmp_path / "notes.jsonl").write_text('{"note": "no dataset"}\n')
    with pytest.raises(UserError, match=r"more than one caption layout fits: one\.jsonl, two\.jsonl; .*\.layout"):
        read_dataset(tmp_path)
    assert read_dataset(tmp_path / "two.jsonl")[0][0].caption == "two.jsonl"
    with pytest.raises(UserError, match=r"dog\.mp4': not a caption file, tar shard or table"):
        read_dataset(tmp_path / "dog.mp4")
    (tmp_path / "dog.txt").write_text("Beside.")
    assert read_dataset(tmp_path, "sidecars")[0][0].caption == "Beside."
    with pytest.raises(UserError, match=r"no files of dataset\.layout parquet"):
        read_dataset(tmp_path, "parquet")


def test_one_of_several_shards_or_tables_can_be_named(tmp_path):
    LAYOUTS["webdataset"](tmp_path / "tar")
    assert [source.name for source in read_dataset(tmp_path / "tar/000001.tar")[0]] == ["000001.tar/towers.mp4"]
    assert len(read_dataset(tmp_path / "tar")[0]) == 2
    LAYOUTS["Parquet of paths"](tmp_path / "set")
    pq.write_table(pa.table({"path": [NAMES[0]], "text": ["Another."]}), tmp_path / "set/other.parquet")
    assert [source.caption for source in read_dataset(tmp_path / "set/other.parquet")[0]] == ["Another."]


def test_images_are_videos_of_one_frame_where_a_bucket_has_one(tmp_path):
    from PIL import Image

    image = Image.new("RGB", (96, 64), (200, 30, 30))
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "small.webp")
    rotated = Image.Exif()
    rotated[0x112] = 6  # turn by 90 degrees to see it upright
    image.save(tmp_path / "photo.jpg", exif=rotated)
    for name in ("plain", "small", "photo"):
        (tmp_path / f"{name}.txt").write_text("Red.")
    config = DatasetConfig(path=str(tmp_path), buckets=["1x64x96", "1x96x64", "8x64x96"])
    clips, quarantined = list_clips(config, None)
    assert quarantined == []
    assert {clip.source.name: clip.bucket for clip in clips} == {
        "plain.png": (1, 64, 96),
        "small.webp": (1, 64, 96),
        "photo.jpg": (1, 96, 64),
    }
    with ClipDecoder(config) as decoder:
        for clip in clips:
            colour = decoder.decode(clip).float().mean(dim=(0, 1, 2)).tolist()
            assert colour == pytest.approx([200, 30, 30], abs=6)
    with pytest.raises(UserError, match="no captions"):
        list_clips(config.model_copy(update={"buckets": ["8x64x96"]}), None)


def add_link(tar, name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    tar.addfile(info)


def test_members_of_tar_files_that_are_no_files_or_lead_outside_are_refused(tmp_path):
    dog = (SAMPLE / NAMES[0]).read_bytes()
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:

        def add(name, content):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))

        for stem in ("../up", "/etc/abs", "emoji 🎬", "new\nline", "one/same", "two/same"):
            add(f"{stem}.mp4", dog)
            add(f"{stem}.txt", stem.encode())
        add_link(tar, "soft.mp4", "/etc/passwd")
        add_link(tar, "hard.mp4", "one/same.mp4", tarfile.LNKTYPE)
        add_link(tar, "pipe.mp4", "", tarfile.FIFOTYPE)
        add_link(tar, "captioned.txt", "/etc/passwd")
        add("captioned.mp4", dog)
        add("playlist.mp4", b"#EXTM3U\n/etc/passwd\n")
        add("playlist.txt", b"A list.")
        add("large.mp4", dog)
        add("large.txt", b"x" * (2 << 20))
        add("bytes.mp4", dog)
        add("bytes.txt", b"caf\xe9")
    config = DatasetConfig(path=str(tmp_path), buckets=["4x90x160"])
    clips, quarantined = list_clips(config, None)
    assert [clip.source.name for clip in clips] == [
        f"x.tar/{stem}.mp4" for stem in ("emoji 🎬", "new\nline", "one/same", "two/same")
    ]
    link = "a link, a device or sparse, which is not followed"
    assert {row.name: row.reason for row in quarantined} == {
        "x.tar/../up.mp4": "path outside the dataset folder",
        "x.tar//etc/abs.mp4": "path outside the dataset folder",
        "x.tar/soft.mp4": link,
        "x.tar/hard.mp4": link,
        "x.tar/pipe.mp4": link,
        "x.tar/captioned.mp4": "missing caption",
        "x.tar/playlist.mp4": "a text file, not a video",
        "x.tar/large.mp4": "the caption has 1048576 bytes, more than 65536",
        "x.tar/bytes.mp4": "the caption is not valid UTF-8",
    }


def test_a_compressed_or_damaged_tar_file_is_named(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w:gz") as tar:
        add_link(tar, "a", "b")
    with pytest.raises(UserError, match=r"x\.tar cannot be read: .*tar file without compression"):
        read_dataset(tmp_path)
    members = {"a.mp4": b"video", "a.txt": b"A.", "b.mp4": b"video" * 1000, "b.txt": b"B."}
    write_tar(tmp_path / "x.tar", members)
    content = bytearray((tmp_path / "x.tar").read_bytes())
    content[2048:2560] = b"\xff" * 512  # the header of b.mp4
    (tmp_path / "x.tar").write_bytes(content)
    sources, rejected = read_dataset(tmp_path)
    assert [source.caption for source in sources] == ["A."]
    assert [row.reason for row in rejected] == ["damaged after 2048 bytes: no header of a member"]


def test_rows_of_tables_that_are_no_clips_are_refused(tmp_path):
    dog = (SAMPLE / NAMES[0]).read_bytes()
    videos = [
        {"bytes": dog, "path": "../../etc/passwd"},
        {"bytes": None, "path": "/etc/passwd"},
        {"bytes": b"#EXTM3U\n/etc/passwd\n", "path": None},
        {"bytes": dog, "path": "nul\0.mp4"},
        {"bytes": dog, "path": None},
    ]
    captions = ["Bytes count.", "Outside.", "A list.", "A name that is not used.", " "]
    pq.write_table(pa.table({"video": videos, "text": captions}), tmp_path / "x.parquet")
    clips, quarantined = list_clips(DatasetConfig(path=str(tmp_path), buckets=["4x90x160"]), None)
    absent = "no bytes of a video in the table, and its path is no file of the dataset folder"
    assert [clip.source.caption for clip in clips] == ["Bytes count.", "A name that is not used."]
    assert {row.name: row.reason for row in quarantined} == {
        "x.parquet:0:1": f"cannot be read: {absent}",
        "x.parquet:0:2": "a text file, not a video",
        "x.parquet:0:4": "empty caption",
    }
    pq.write_table(pa.table({"clip": [b""], "text": ["A."]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet has no column for a video \(.*\); its columns are clip, text"):
        read_dataset(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(UserError, match=r"x\.parquet cannot be read"):
        read_dataset(tmp_path)


def test_a_toml_file_cannot_name_folders_outside(tmp_path):
    folder = tmp_path / "set"
    copy_videos(folder / "clips")
    copy_videos(tmp_path / "outside")
    (folder / "dataset.toml").write_text("[[directory]]\npath = '../outside'\n[[directory]]\npath = 'clips'\n")
    sources, rejected = read_dataset(folder)
    assert sources == []
    assert [(row.name, row.reason) for row in rejected] == [
        ("dataset.toml:directory[0]", "../outside: path outside the dataset folder"),
        ("clips/dog.mp4", "missing caption"),
        ("clips/towers.mp4", "missing caption"),
    ]
    (folder / "dataset.toml").write_text("[[directory]]\nnum_repeats = 1\n")
    with pytest.raises(UserError, match=r"dataset\.toml:directory\[0\] names no folder; give it one of"):
        read_dataset(folder)
