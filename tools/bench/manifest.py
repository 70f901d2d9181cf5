"""Time and memory of the manifest of a large dataset: writing it, and finding unchanged files in it.

    python tools/bench/manifest.py [ROWS]

The videos are made up, so that what is measured is the manifest and not the disk or the decoders. CPU time and peak
memory of this process are printed; the memory includes the interpreter and the imported libraries.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from ttv_train.config import DatasetConfig
from ttv_train.data.cut import Cutter
from ttv_train.data.dataset_manifest import KnownManifest, write_manifest
from ttv_train.data.formats import VideoSource
from ttv_train.data.probe import VideoInfo
from ttv_train.data.scan import ScannedVideo, Stamp

CONFIG = DatasetConfig(buckets=["49x480x720"])
INFO = VideoInfo("mov", "h264", 1280, 720, 250, Fraction(10), Fraction(1, 12800), 0, "0" * 32)


def make_videos(rows: int) -> Iterator[ScannedVideo]:
    """Videos of one clip each."""
    cutter = Cutter.of(CONFIG)
    for number in range(rows):
        name = f"folder/clip_{number:08d}.mp4"
        source = VideoSource(Path("/data", name), name, f"A caption of the usual length, of video number {number}.")
        sha256 = f"{number:064x}"
        clips, _ = cutter.cut(source, INFO, sha256)
        yield ScannedVideo(source, Stamp(1_000_000 + number, number, number), INFO, sha256, None, clips=clips)


def report(what: str, started: float) -> None:
    """Prints CPU seconds since `started` and the highest resident memory so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {time.process_time() - started:.1f} s of CPU time, peak {peak:.0f} MB", flush=True)


def main(rows: int) -> None:
    """Writes a manifest of `rows` clips and looks every one of them up."""
    print(f"{rows:,} rows")
    report("before", time.process_time())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dataset.parquet")
        started = time.process_time()
        with write_manifest(path, CONFIG) as writer:
            for video in make_videos(rows):
                writer.add(video, were_decoded=True)
        report(f"written, {path.stat().st_size / 2**20:.0f} MB", started)
        started = time.process_time()
        known = KnownManifest.read(path, CONFIG)
        assert known is not None
        report("opened again", started)
        started = time.process_time()
        for video in make_videos(min(rows, 100_000)):
            assert video.stamp is not None
            assert known.find(video.source, video.stamp) is not None
        report(f"{min(rows, 100_000):,} files found in it", started)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
