"""The progress bar of training."""

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0
"""In a log file every refresh of the bar is a line of its own."""


class TrainingProgress:
    """A tqdm bar over optimizer steps on the main rank, with loss, rates and ETA; nothing on the other ranks.

    Args:
        total_steps: length of the run.
        start_step: steps done before this process started.
        is_main: whether this rank shows the bar.
    """

    def __init__(self, total_steps: int, start_step: int, *, is_main: bool) -> None:
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            desc="train",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES,
            disable=not is_main,
        )

    def update(self, record: Mapping[str, Any]) -> None:
        """Advances by one step, whose `loss`, `frames_per_second` and `tokens_per_second` are shown."""
        self._bar.set_postfix_str(
            f"loss {record['loss']:.4f}, {record['frames_per_second']:.1f} frames/s, "
            f"{record['tokens_per_second']:,.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leaves the bar on the terminal as it stands."""
        self._bar.close()
