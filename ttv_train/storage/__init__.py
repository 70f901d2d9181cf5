"""Where encoded data lives: a local folder or any URL that fsspec can open."""

from ttv_train.storage.store import Store

__all__ = ["Store"]
