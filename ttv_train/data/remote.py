"""Clips that other ranks of the job encode: a trainer asks for them, well ahead, and the encoder rank answers.

The requests are those of the trainer's own reading ahead, so encoders follow its order of data, are bounded by it, know
of replacements of bad samples and of a resumed run, and need no plan of their own.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence

import torch

from ttv_train.data.cut import Clip
from ttv_train.data.encoder_link import EncoderLink
from ttv_train.data.sample_messages import CLIPS, unpack_results
from ttv_train.data.shards import LatentEntry, LatentNormalization, SampleReads, SampleResult, unpack_null_prompt
from ttv_train.errors import UserError


class RemoteDataset(SampleReads):
    """Implements `LatentDataset`. Reads from encoder ranks in turn.

    Args:
        path: of the clips' dataset.
        clips: by key.
        entries: of the same clips, in the order of the dataset.
        num_quarantined: files that gave no clip.
        normalization, null_prompt: of the encoders.
        links: to encoder ranks; without any, it says what there is and reads nothing.
    """

    fingerprint = ""
    joins_reads = False

    def __init__(
        self,
        path: str,
        clips: Mapping[str, Clip],
        entries: Sequence[LatentEntry],
        num_quarantined: int,
        normalization: LatentNormalization,
        null_prompt: tuple[torch.Tensor, torch.Tensor],
        links: Sequence[EncoderLink],
    ) -> None:
        self.path, self.entries, self.num_quarantined = path, entries, num_quarantined
        self.normalization, self._null_prompt = normalization, null_prompt
        self._clips, self._links = clips, links
        self._by_key = {entry.key: entry for entry in entries}
        self._turns = itertools.cycle(links)
        self._turning = threading.Lock()

    def read_many(self, entries: Sequence[LatentEntry]) -> list[SampleResult]:
        """Samples in the order asked for, each as it is or as the CorruptSampleError that its reading ended in. Raises
        what `EncoderLink.ask` raises."""
        with self._turning:
            link = next(self._turns)
        clips = [(entry.key, self._clips[entry.key]) for entry in entries]
        header, content = link.ask({"clips": CLIPS.dump_python(clips, mode="json")})
        return [result for _, result in unpack_results(header, content, self._by_key)]

    def null_prompt(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Embedding (L, D) and mask (L,) of the empty prompt."""
        return self._null_prompt

    def close(self) -> None:
        """See `LatentDataset.close`."""
        for link in self._links:
            link.close()


def ask_about_encoders(link: EncoderLink, fingerprints: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The empty prompt's embedding (L, D) and mask (L,), of an encoder rank.

    Raises:
        UserError: it has other encoders than those of `fingerprints`.
    """
    header, content = link.ask({"about": True})
    if header["fingerprints"] != list(fingerprints):
        raise UserError(
            "vae.path, text_encoder.path: an encoder rank has other models there than the ranks that train; copy them "
            "to all nodes"
        )
    return unpack_null_prompt(content)
