"""What a store holds besides its committed dataset: `encode --status` and `encode --gc`."""

import time
from dataclasses import dataclass
from pathlib import PurePosixPath

import fsspec

from ttv_train.data.manifest import read_manifest
from ttv_train.data.units import RECORDS_FOLDER, WorkUnit, read_records, shards_of_records
from ttv_train.encoding.leases import Leases
from ttv_train.errors import UserError
from ttv_train.storage import Store

COLLECTED_PREFIXES = ("shards/", "index-", "null-prompt-")
"""Of objects that the job writes and that a manifest or a record refers to; everything else stays."""


@dataclass(frozen=True)
class Status:
    """How far an encoding job is."""

    wanted: int
    """Clips of the dataset."""
    committed: int
    """Of these, fresh in the committed dataset."""
    finished: int
    """Of these, encoded but not committed yet."""
    stale: int
    """Samples of the committed dataset that are of no clip under the settings of the config."""
    quarantined: int
    """Files and clips that were left out before decoding."""
    workers: int
    """That hold leases."""
    clips_per_second: float
    """Of all workers together."""

    @property
    def missing(self) -> int:
        """Clips that are still to be encoded."""
        return self.wanted - self.committed - self.finished

    def __str__(self) -> str:
        lines = [
            f"done         {self.committed + self.finished} of {self.wanted} clips, {self.committed} of them committed",
            f"missing      {self.missing}",
            f"stale        {self.stale}",
            f"quarantined  {self.quarantined}",
            f"workers      {self.workers}",
        ]
        if self.missing and self.clips_per_second:
            minutes = self.missing / self.clips_per_second / 60
            lines.append(f"time left    {minutes:.0f} min at {self.clips_per_second:.2f} clips/s")
        return "\n".join(lines)


def progress_of(store: Store, units: list[WorkUnit], lease_seconds: float) -> tuple[int, int, float]:
    """Clips of finished units, workers that hold the others, and the clips per second of these workers."""
    if not units:
        return 0, 0, 0.0
    leases = Leases(store, f"{units[0].folder}/leases", lease_seconds)
    finished, rates = 0, {}
    for unit, record in zip(units, read_records(store, units), strict=True):
        state = leases.state_of(unit.name) if record is None else None
        if record is not None:
            finished += len(unit.clips)
        elif state is not None:
            rates[state.holder] = state.clips_per_second
    return finished, len(rates), sum(rates.values())


def collect_garbage(store: Store, min_age_seconds: float) -> tuple[int, int]:
    """Removes objects that neither the committed dataset nor the record of a finished unit refers to. Young ones stay:
    a running worker may be about to refer to them.

    Returns:
        How many objects were removed, and how many there were of their kinds.

    Raises:
        UserError: there is no committed dataset by which to tell, or the store cannot be listed.
    """
    manifest, _ = read_manifest(store)
    try:
        filesystem, root = fsspec.core.url_to_fs(store.url)
    except (ValueError, ImportError):
        raise UserError(
            f"latents.path {store.url} cannot be listed; run --gc with the path of the storage behind it"
        ) from None
    names = {str(PurePosixPath(path).relative_to(root)): path for path in filesystem.find(root)}
    records = [name for name in names if name.startswith(f"{RECORDS_FOLDER}/") and "/leases/" not in name]
    kept = {stored.name for stored in (manifest.index, manifest.null_prompt, *manifest.shards)}
    kept |= shards_of_records(store, records)
    mine = [name for name in names if name.startswith(COLLECTED_PREFIXES)]
    oldest = time.time() - min_age_seconds
    garbage = [name for name in mine if name not in kept and filesystem.modified(names[name]).timestamp() < oldest]
    # A job that ran meanwhile may have committed what was garbage before.
    manifest, _ = read_manifest(store)
    kept |= {stored.name for stored in (manifest.index, manifest.null_prompt, *manifest.shards)}
    garbage = [name for name in garbage if name not in kept]
    for name in garbage:
        store.delete(name)
    store.remove_partial_files()
    return len(garbage), len(mine)
