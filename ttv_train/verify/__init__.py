"""The proof that parallel equals serial, on the user's own machine: `ttv-train verify`.

`sequence` compares sequence-parallel training with one process, for every model family and scheme, on ranks that
`ranks` starts.
"""
