"""webdataset shards: tar files whose members of one stem belong together. Nothing is unpacked: videos are read
in place.

Links, devices and sparse members are never followed, and the names of members never become paths.
"""

import json
import posixpath
import tarfile
from collections.abc import Iterator
from pathlib import Path

from ttv_train.data.caption_files import CAPTION_COLUMNS, Row, first_caption
from ttv_train.errors import UserError

CAPTION_SUFFIXES = (".txt", ".json")
MAX_JSON_CAPTION_BYTES = 1 << 20


def read_tar(path: Path, media_suffixes: frozenset[str]) -> Iterator[Row]:
    """A row per video, in the order of the file.

    Raises:
        UserError: it is compressed, or no tar file at all.
    """
    try:
        with tarfile.open(path, "r:", errors="surrogateescape") as tar:
            yield from read_members(tar, path.name, media_suffixes)
    except tarfile.ReadError as error:
        raise UserError(
            f"{path} cannot be read: {error}; videos are read in place, so it must be a tar file without compression"
        ) from None


def read_members(tar: tarfile.TarFile, shard: str, media_suffixes: frozenset[str]) -> Iterator[Row]:
    """Collects the members of one stem, which follow each other."""
    stem: str | None = None
    videos: list[Row] = []
    caption: object = None
    while True:
        try:
            member = tar.next()
        except tarfile.TarError as error:
            yield Row(shard, None, None, f"damaged after {tar.offset} bytes: {error}")
            member = None
        if member is None and not ends_here(tar):
            yield Row(shard, None, None, f"damaged after {tar.offset} bytes: no header of a member")
        key, suffix = split_name(member.name) if member is not None else (None, "")
        if key != stem:
            for row in videos:
                yield Row(row.origin, row.name, caption, row.problem, shard, row.span)
            stem, videos, caption = key, [], None
        if member is None:
            return
        if suffix in media_suffixes:
            origin = f"{shard}/{member.name}"
            if posixpath.isabs(member.name) or ".." in member.name.split("/"):
                videos.append(Row(origin, origin, None, "path outside the dataset folder"))
            elif not member.isreg() or member.issparse():
                videos.append(Row(origin, origin, None, "a link, a device or sparse, which is not followed"))
            else:
                videos.append(Row(origin, origin, None, span=(member.offset_data, member.size)))
        elif suffix in CAPTION_SUFFIXES and member.isreg() and caption is None:
            caption = read_caption(tar, member, suffix)
        # What has been read is of no more use; a shard may have a million members.
        tar.members = []  # type: ignore[attr-defined]


def ends_here(tar: tarfile.TarFile) -> bool:
    """Whether the archive ends where no more members were found, rather than being damaged there."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    return not tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0")


def split_name(name: str) -> tuple[str, str]:
    """The stem that the members of a sample share, up to the first dot of the file name, and the last suffix."""
    folder, file = posixpath.split(name)
    return posixpath.join(folder, file.partition(".")[0]), posixpath.splitext(file)[1].lower()


def read_caption(tar: tarfile.TarFile, member: tarfile.TarInfo, suffix: str) -> object:
    """The caption of a .txt or .json member; None if there is none in it."""
    file = tar.extractfile(member)
    assert file is not None
    text = file.read(MAX_JSON_CAPTION_BYTES).decode("utf-8-sig", errors="surrogateescape")
    if suffix == ".txt":
        return text
    try:
        columns = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(columns, dict):
        return None
    return first_caption(next((columns[name] for name in CAPTION_COLUMNS if columns.get(name) is not None), None))
