"""Which folders are Alluxio mounts, by the kernel's mount table."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mounts")
OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")


def is_alluxio_mount(folder: Path, mount_table: Path = MOUNT_TABLE) -> bool:
    """Whether `folder` lies in a FUSE mount of Alluxio. Touches the mount table only: a mount may hang."""
    path = Path(os.path.abspath(folder))  # noqa: PTH100 - Path.resolve would ask the mount
    mounts = [(point, kind) for point, kind in _mounts(mount_table) if path.is_relative_to(point)]
    return bool(mounts) and "alluxio" in max(mounts, key=lambda mount: len(mount[0].parts))[1]


def _mounts(mount_table: Path) -> Iterator[tuple[Path, str]]:
    """Mount points, and source and file system type as one text."""
    try:
        lines = mount_table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not a Linux system
        return
    for line in lines:
        source, point, kind, *_ = line.split(" ")
        unescaped = OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), point)
        yield Path(unescaped), f"{source} {kind}".lower() if kind.startswith("fuse") else ""
