"""The proof that parallel equals serial, on the user's own machine: `ttv-train verify`.

`sequence` compares sequence-parallel training with one process, for every model family and scheme, on ranks that
`ranks` starts.
"""

FAULTS = {
    "skip-mask": "attend to the padding of captions, as if they had no mask",
    "drop-gradient": "lose the gradient of the keys and values of one block, the last rank's",
    "double-text": "count the gradient of the text twice, as if both copies were summed",
}
"""Mistakes that a parallel run can be told to make; `faults` makes them. Here for the command line, which must not
import torch."""
