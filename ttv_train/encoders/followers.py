"""Ranks that work on the clips of another rank: the leader of a group decodes and writes, all of them encode."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ttv_train.encoders.vae.base import LatentDistribution, VideoVae
from ttv_train.errors import UserError
from ttv_train.parallel.mesh import consecutive_ranks
from ttv_train.parallel.messages import LONGEST_WAIT

NUM_DIMS = 5
"""Of a video (B, 3, T, H, W)."""
LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo says of a rank whose process has ended. It says so at once, long before a timeout."""


@dataclass(frozen=True)
class EncodingGroup:
    """Ranks that encode each clip together."""

    work: dist.ProcessGroup
    """Of the device's collectives: halos, norms, the clip itself."""
    control: dist.ProcessGroup
    """The same ranks in gloo, where those that wait for a clip keep no device busy."""

    @property
    def is_follower(self) -> bool:
        """Whether this rank only helps the first rank of the group."""
        return dist.get_rank(self.work) > 0


def encoding_group(degree: int, timeout: timedelta = LONGEST_WAIT) -> EncodingGroup | None:
    """The `degree` consecutive ranks that this one shares its clips with; None where each rank encodes alone.

    Called on all ranks together.

    Args:
        timeout: of the exchanges within a clip.

    Raises:
        UserError: `degree` does not divide the number of ranks.
    """
    if degree == 1:
        return None
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size % degree:
        raise UserError(
            f"vae.parallel.degree {degree} does not divide the {world_size} process(es) of this job; start a multiple "
            f"of {degree} processes or change the degree"
        )
    return EncodingGroup(consecutive_ranks(degree, timeout), consecutive_ranks(degree, LONGEST_WAIT, "gloo"))


class LeadingVae:
    """The VAE of a group's first rank: whatever it encodes, the followers encode with it.

    Args:
        vae: shares each clip with `group`.
        number: tells the followers which of several VAEs it is.
    """

    def __init__(self, vae: VideoVae, group: EncodingGroup, device: torch.device, number: int = 0) -> None:
        self._vae, self._group, self._device, self._number = vae, group, device, number

    def __getattr__(self, name: str) -> Any:
        # All that does not concern the pixels of a clip is the VAE's own.
        return getattr(self._vae, name)

    def encode(self, video: torch.Tensor) -> LatentDistribution:
        """See `VideoVae.encode`. Raises UserError if a follower's process has ended."""
        video = video.to(self._device, torch.float32).contiguous()
        with _naming_lost_ranks(self._group):
            dist.broadcast(torch.tensor([self._number, *video.shape]), group=self._group.control, group_src=0)
            dist.broadcast(video, group=self._group.work, group_src=0)
            return self._vae.encode(video)


def dismiss_followers(group: EncodingGroup) -> None:
    """Ends `follow` on the other ranks of the leader's group. Raises UserError if a follower's process has ended."""
    with _naming_lost_ranks(group):
        dist.broadcast(torch.full((1 + NUM_DIMS,), -1), group=group.control, group_src=0)


def follow(group: EncodingGroup, device: torch.device, vae_of: Callable[[int], VideoVae]) -> None:
    """Encodes what the group's leader encodes, until it dismisses this rank.

    Args:
        vae_of: the VAE of a `LeadingVae.number`.

    Raises:
        UserError: the process of another rank of the group has ended.
    """
    with _naming_lost_ranks(group):
        while True:
            announcement = torch.empty(1 + NUM_DIMS, dtype=torch.int64)
            dist.broadcast(announcement, group=group.control, group_src=0)
            number, *shape = announcement.tolist()
            if number < 0:
                return
            video = torch.empty(shape, device=device)
            dist.broadcast(video, group=group.work, group_src=0)
            vae_of(number).encode(video)


@contextmanager
def _naming_lost_ranks(group: EncodingGroup) -> Iterator[None]:
    """Turns what an exchange ends in when a process of the group is gone into an error that names it."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in LOST_CONNECTION):
            raise
        rank = dist.get_rank()
        others = [other for other in dist.get_process_group_ranks(group.control) if other != rank]
        lost = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(map(str, others))}"
        raise UserError(
            f"{lost}, which encodes with rank {rank}, has ended; look at its output, or whether it was killed for want "
            "of memory; the same command goes on from what is done"
        ) from error
