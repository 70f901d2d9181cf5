"""Where encoded data lives: a folder, a mount, or any URL that can be opened."""

from ttv_train.storage.base import Store
from ttv_train.storage.opening import open_store

__all__ = ["Store", "open_store"]
