"""A decoder process with the fault that the name of the file it is given asks for."""

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ttv_train.data import decode_worker


class FaultyWorker(decode_worker.Worker):
    """Has the fault first; then answers as a sound worker does."""

    def answer(self, request: dict[str, Any]) -> Iterator[tuple[bytes, bytes | memoryview]]:
        fault = Path(request["path"]).stem
        if fault == "crash":
            ctypes.string_at(0)
        elif fault == "hang":
            time.sleep(600)
        elif fault == "grow":
            np.ones(8 << 30, dtype=np.uint8)
        elif fault == "exit":
            sys.exit(3)
        elif fault == "close":
            os.closerange(3, 1000)
            time.sleep(600)
        elif fault == "unsound":
            yield decode_worker.FRAME, b"a frame nobody asked for"
        elif fault == "print":
            os.write(1, b"printed by a library\n")
        yield from super().answer(request)


if __name__ == "__main__":
    decode_worker.Worker = FaultyWorker
    decode_worker.main()
