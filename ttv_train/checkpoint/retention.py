"""Which checkpoints stay."""

import logging
import secrets
import shutil
from pathlib import Path

from ttv_train.checkpoint.layout import TEMPORARY_PREFIX, list_checkpoints
from ttv_train.checkpoint.verify import verify
from ttv_train.parallel.agreement import on_main_rank

logger = logging.getLogger(__name__)


def keep_newest(saved: Path, keep_last: int) -> None:
    """Removes all but `keep_last` checkpoints: the one just `saved` and the newest others that verify; on all ranks.

    A damaged checkpoint never counts as one of those that stay, so `keep_last` good ones are there to fall back to. The
    price is reading the others once per save, shared by the ranks.
    """
    others = on_main_rank(lambda: [path for path in list_checkpoints(saved.parent) if path != saved])
    if len(others) < keep_last:
        return
    kept = [saved]
    for path in others:
        if len(kept) < keep_last and not verify(path):
            kept.append(path)
    on_main_rank(lambda: _remove([path for path in others if path not in kept]))


def _remove(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        try:
            remove_folder(set_aside(path))
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error.strerror)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed runs left half written or half removed. Only for the holder of the run folder's lock."""
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        remove_folder(path)


def set_aside(path: Path) -> Path:
    """Renames a checkpoint to what `remove_leftovers` removes, so that no part of it is ever there under its name."""
    return path.rename(path.with_name(f"{TEMPORARY_PREFIX}removed-{path.name}-{secrets.token_hex(4)}"))


def remove_folder(path: Path) -> None:
    """Removes a folder as far as possible: on NFS, files that a reader has open stay until it is done."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed entirely; the next save tries again", path)
