"""A dataset of two sample videos in every layout that is read."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.video_files import SAMPLE

NAMES = ("dog.mp4", "towers.mp4")
CAPTIONS = {"dog.mp4": "A dog, white and fluffy.", "towers.mp4": "Towers at night."}


def copy_videos(folder: Path) -> None:
    """Puts the videos into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).write_bytes((SAMPLE / name).read_bytes())


def write_rows(path: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_metadata_jsonl(folder: Path) -> None:
    copy_videos(folder)
    write_rows(folder / "metadata.jsonl", [{"file_name": name, "text": CAPTIONS[name]} for name in NAMES])


def write_metadata_csv(folder: Path) -> None:
    """As DiffSynth-Studio has it."""
    copy_videos(folder)
    rows = [f'{name},"{CAPTIONS[name]}"' for name in NAMES]
    (folder / "metadata.csv").write_text("\n".join(["video,prompt", *rows]) + "\n")


def write_open_sora_csv(folder: Path) -> None:
    copy_videos(folder)
    rows = [f'{folder / name},"{CAPTIONS[name]}",41,180,320' for name in NAMES]
    (folder / "meta.csv").write_text("\n".join(["path,text,num_frames,height,width", *rows]) + "\n")


def write_videos2caption(folder: Path) -> None:
    copy_videos(folder / "videos")
    rows = [{"path": name, "cap": [CAPTIONS[name], "another"], "fps": 25, "duration": 1.6} for name in NAMES]
    (folder / "videos2caption.json").write_text(json.dumps(rows))


def write_captions_json(folder: Path) -> None:
    copy_videos(folder)
    (folder / "captions.json").write_text(json.dumps({name: [CAPTIONS[name]] for name in NAMES}))


def write_musubi_jsonl(folder: Path) -> None:
    copy_videos(folder)
    write_rows(folder / "train.jsonl", [{"video_path": name, "caption": CAPTIONS[name]} for name in NAMES])


def write_musubi_toml(folder: Path) -> None:
    copy_videos(folder / "clips")
    for name in NAMES:
        (folder / "clips" / name).with_suffix(".caption").write_text(CAPTIONS[name])
    (folder / "dataset.toml").write_text(
        '[general]\nresolution = [320, 180]\ncaption_extension = ".caption"\n'
        '[[datasets]]\nvideo_directory = "clips"\ntarget_frames = [1, 25]\n'
    )


def write_diffusion_pipe_toml(folder: Path) -> None:
    copy_videos(folder / "clips")
    for name in NAMES:
        (folder / "clips" / name).with_suffix(".txt").write_text(CAPTIONS[name])
    (folder / "dataset.toml").write_text("[[directory]]\npath = 'clips'\nnum_repeats = 10\n")


def write_line_files(folder: Path) -> None:
    copy_videos(folder)
    (folder / "videos.txt").write_text("\n".join(NAMES))
    (folder / "prompts.txt").write_text("\n".join(CAPTIONS[name] for name in NAMES))


def write_sidecars(folder: Path) -> None:
    copy_videos(folder)
    for name in NAMES:
        (folder / name).with_suffix(".txt").write_text(CAPTIONS[name])


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """A tar file of regular members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_webdataset(folder: Path) -> None:
    folder.mkdir()
    dog, towers = ((SAMPLE / name).read_bytes() for name in NAMES)
    write_tar(folder / "000000.tar", {"a/dog.mp4": dog, "a/dog.txt": CAPTIONS["dog.mp4"].encode()})
    caption = json.dumps({"caption": CAPTIONS["towers.mp4"]}).encode()
    write_tar(folder / "000001.tar", {"towers.json": caption, "towers.mp4": towers})


def write_parquet(folder: Path) -> None:
    """With the videos in the table, as the Hugging Face hub stores them."""
    folder.mkdir()
    videos = [{"bytes": (SAMPLE / name).read_bytes(), "path": name} for name in NAMES]
    table = pa.table({"video": videos, "text": [CAPTIONS[name] for name in NAMES]})
    pq.write_table(table, folder / "train-00000-of-00001.parquet", row_group_size=1)


def write_parquet_of_paths(folder: Path) -> None:
    copy_videos(folder)
    pq.write_table(pa.table({"path": list(NAMES), "text": [CAPTIONS[name] for name in NAMES]}), folder / "meta.parquet")


def write_huggingface(folder: Path) -> None:
    """As `datasets.Dataset.save_to_disk` does."""
    folder.mkdir()
    videos = [{"bytes": (SAMPLE / name).read_bytes(), "path": None} for name in NAMES]
    table = pa.table({"video": videos, "caption": [CAPTIONS[name] for name in NAMES]})
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=1)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))


LAYOUTS = {
    "metadata.jsonl": write_metadata_jsonl,
    "metadata.csv": write_metadata_csv,
    "Open-Sora CSV": write_open_sora_csv,
    "FastVideo JSON": write_videos2caption,
    "captions.json": write_captions_json,
    "musubi-tuner JSONL": write_musubi_jsonl,
    "musubi-tuner TOML": write_musubi_toml,
    "diffusion-pipe TOML": write_diffusion_pipe_toml,
    "line files": write_line_files,
    "text files": write_sidecars,
    "webdataset": write_webdataset,
    "Parquet": write_parquet,
    "Parquet of paths": write_parquet_of_paths,
    "Hugging Face": write_huggingface,
}
