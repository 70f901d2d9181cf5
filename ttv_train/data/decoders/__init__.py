"""Decoding libraries behind one interface, and the choice among them by what a file's packets say.

Runs in the decoder's child process.
"""

import importlib
import importlib.util

from ttv_train.data.decoders.base import Decoder, FrameReader, Picture
from ttv_train.data.decoders.decord import Decord
from ttv_train.data.decoders.pyav import Pyav
from ttv_train.data.decoders.torchcodec import Torchcodec
from ttv_train.data.frame_index import FrameIndex
from ttv_train.data.probe import BadVideoError

__all__ = ["DECODERS", "Decoder", "FrameReader", "Picture", "choose_decoder", "import_decoder", "is_installed"]

DECODERS: dict[str, Decoder] = {decoder.name: decoder for decoder in (Pyav(), Torchcodec(), Decord())}
"""By name, fastest first (docs/benchmarks.md)."""


def is_installed(name: str) -> bool:
    """Whether a decoder's module can be found; it is not imported."""
    return importlib.util.find_spec(DECODERS[name].module) is not None


def import_decoder(name: str) -> None:
    """Imports a decoder's library. Raises what the import raises."""
    importlib.import_module(DECODERS[name].module)


def choose_decoder(name: str, index: FrameIndex) -> Decoder:
    """The decoder called `name`; for `auto` the fastest one that is installed and right on the file.

    Raises:
        BadVideoError: the decoder would show wrong frames of the file.
    """
    if name == "auto":
        return next(
            decoder for decoder in DECODERS.values() if decoder.refusal(index) is None and is_installed(decoder.name)
        )
    decoder = DECODERS[name]
    reason = decoder.refusal(index)
    if reason is not None:
        raise BadVideoError(f"dataset.decoder {name}: {reason}; use auto or pyav")
    return decoder
