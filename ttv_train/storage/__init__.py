"""Where encoded data lives: a folder, a mount, or any URL that can be opened."""

from ttv_train.storage.base import Store
from ttv_train.storage.failures import DamagedReadError, StoreUnavailableError
from ttv_train.storage.opening import open_store
from ttv_train.storage.ranges import ByteRange, Content

__all__ = ["ByteRange", "Content", "DamagedReadError", "Store", "StoreUnavailableError", "open_store"]
