"""A dataset whose clips are decoded and encoded when training asks for them, instead of ahead of it.

To training it is the same as latents that were encoded before: the same keys, the same order and the same loss curve.
Every rank encodes what it trains on, where ranks that train on the same clips share that work; or other ranks of the
job do it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ttv_train.config import RunConfig
from ttv_train.data.changed_sources import DATASET_MANIFEST
from ttv_train.data.clip_reader import ClipReader
from ttv_train.data.cut import Clip
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.encoder_link import EncoderLink
from ttv_train.data.keyed_clips import entry_of, list_keyed_clips
from ttv_train.data.quarantine import STAGES_OF_ENCODING, Quarantine
from ttv_train.data.remote import RemoteDataset, ask_about_encoders
from ttv_train.data.shards import LatentEntry, SampleReads, SampleResult
from ttv_train.data.shared import SharedDataset
from ttv_train.encoders.clip_encoder import ClipEncoder
from ttv_train.encoders.followers import encoding_group
from ttv_train.errors import UserError
from ttv_train.parallel.agreement import on_all_ranks, on_main_rank
from ttv_train.parallel.mesh import consecutive_ranks
from ttv_train.parallel.messages import LONGEST_WAIT


class OnlineDataset(SampleReads):
    """Implements `LatentDataset`. Samples may be read from several threads.

    Args:
        path: of the clips' dataset.
        clips: by key, in the order of the dataset.
        num_quarantined: files that gave no clip.
        reader: decodes and encodes.
    """

    fingerprint = ""
    joins_reads = False

    def __init__(self, path: str, clips: Mapping[str, Clip], num_quarantined: int, reader: ClipReader) -> None:
        self.path, self.num_quarantined = path, num_quarantined
        self.normalization = reader.encoder.vae.normalization
        self.entries = [entry_of(key, clip, reader.encoder) for key, clip in clips.items()]
        self._clips, self._reader = clips, reader

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """Samples in the order asked for, each as it is or as the CorruptSampleError that its reading ended in."""
        return [self._reader.read(entry, self._clips[entry.key]) for entry in entries]

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        return self._reader.null_prompt()

    def close(self) -> None:
        """See `LatentDataset.close`; waits for the clip that is being encoded."""
        self._reader.close()


def open_online(config: RunConfig, device: torch.device, writes: bool) -> LatentDataset:
    """The clips of `dataset`, on all ranks together; rank 0 lists them. Ranks that train on the same clips deal them
    among each other; `vae.parallel.degree` of them encode each one together.

    Args:
        config: of the run.
        device: of the encoders.
        writes: keep a manifest of the dataset in the output folder, and note in quarantine.jsonl what gives no clip.

    Raises:
        UserError: on every rank, if the dataset cannot be read or gives no clip, the VAE does not take its buckets, or
            ranks that encode together would train on different clips.
    """
    degree, sequence_degree = config.vae.parallel.degree, config.parallel.sequence.degree
    if sequence_degree % degree:
        raise UserError(
            f"vae.parallel.degree {degree} does not divide parallel.sequence.degree {sequence_degree}: with "
            "latents.online, ranks that encode a clip together must train on it together; change one of them"
        )
    group = encoding_group(degree, timedelta(seconds=config.parallel.timeout_seconds))
    reader = ClipReader(config, device, group)
    clips, num_quarantined = on_main_rank(lambda: list_keyed(config, reader.encoder, writes))
    dataset = OnlineDataset(config.dataset.path, clips, num_quarantined, reader)
    if sequence_degree == 1:
        return dataset
    sharing = consecutive_ranks(sequence_degree, LONGEST_WAIT, "gloo")
    is_follower = group is not None and group.is_follower
    return SharedDataset(dataset, sharing, range(0, sequence_degree, degree), reader.follow if is_follower else None)


def open_remote(config: RunConfig, groups: Sequence[dist.ProcessGroup], writes: bool) -> LatentDataset:
    """`open_online` where other ranks of the job encode.

    Args:
        groups: the links of this rank to encoder ranks; the first rank of each sequence-parallel group has some.

    Raises:
        UserError: as `open_online` does, or if encoder ranks have other models than these.
    """
    # Says what there is; its weights are never loaded.
    encoder = ClipEncoder(config.vae, config.text_encoder, torch.device("cpu"), config.first_frame)
    links = [EncoderLink(group) for group in groups]
    try:
        clips, num_quarantined, fingerprints = on_main_rank(
            lambda: (*list_keyed(config, encoder, writes), encoder.fingerprints)
        )
        found = on_all_ranks(lambda: [ask_about_encoders(link, fingerprints) for link in links])
    except BaseException:
        for link in links:
            link.close()
        raise
    dataset = RemoteDataset(
        config.dataset.path,
        clips,
        [entry_of(key, clip, encoder) for key, clip in clips.items()],
        num_quarantined,
        encoder.vae.normalization,
        found[0][0],
        links,
    )
    degree = config.parallel.sequence.degree
    if degree == 1:
        return dataset
    group = consecutive_ranks(degree, LONGEST_WAIT, "gloo")
    return SharedDataset(dataset, group, owners=[0])


def list_keyed(config: RunConfig, encoder: ClipEncoder, writes: bool) -> tuple[dict[str, Clip], int]:
    """The clips of `dataset` by key, and how many files and clips were left out. See `open_online`."""
    output = Path(config.output_dir)
    manifest = output / DATASET_MANIFEST if writes else None
    keyed, rejected = list_keyed_clips(config.dataset, encoder, manifest)
    if writes:
        Quarantine(output / "quarantine.jsonl").replace(STAGES_OF_ENCODING, rejected)
    if not keyed:
        raise UserError(f"dataset.path {config.dataset.path}: it gives no clip; `ttv-train check-data` says why")
    return keyed, len(rejected)
