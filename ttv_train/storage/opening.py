"""The one door to storage: from a URL to a store with its layers."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ttv_train.config import StorageConfig
from ttv_train.errors import UserError
from ttv_train.storage.alluxio import AlluxioStore
from ttv_train.storage.base import Door, Store
from ttv_train.storage.batched import BatchedReads
from ttv_train.storage.breaker import breaker_of
from ttv_train.storage.fallback import FallbackReads
from ttv_train.storage.fsspec_store import FsspecStore
from ttv_train.storage.integrity import VerifiedReads
from ttv_train.storage.local_tier import LocalTier
from ttv_train.storage.membership import EtcdWorkers, NamedWorkers
from ttv_train.storage.mounts import is_alluxio_mount
from ttv_train.storage.posix import PosixStore
from ttv_train.storage.retry import RetriedReads
from ttv_train.storage.s3 import open_alluxio_s3, open_s3
from ttv_train.storage.watchdog import WatchedDoor

CREDENTIALS = re.compile(r"^[a-z0-9+.]+://[^/]*@|[?&]")
MIB = 2**20


def open_store(url: str, config: StorageConfig | None = None) -> Store:
    """The store at a local folder, a mount or a URL, under the layers that `config` asks for.

    From the outside in: local tier, fallback to the under-store, retries, verification, coalesced parallel requests,
    watchdog of a mount, and the door itself. `config` defaults to the section's defaults.

    Raises:
        UserError: the URL's protocol is unknown or not allowed, its package is not installed, or it holds credentials.
    """
    config = config or StorageConfig()
    door = open_door(url, config)
    fallback = under_store_url(url, config)
    store = _with_layers(door, config, fail_fast=fallback is not None)
    if fallback is not None:
        secondary = open_door(fallback, config)
        secondary.tier = "under_store"
        store = FallbackReads(store, _with_layers(secondary, config, fail_fast=False))
    if config.cache_dir:
        max_bytes = int(config.cache_gib * 2**30)
        store = LocalTier(store, Path(config.cache_dir), max_bytes, config.deadline_seconds)
    return store


def under_store_url(url: str, config: StorageConfig) -> str | None:
    """Where the objects of an Alluxio folder or URL lie in the under-store, by `storage.under_stores`."""
    for prefix, target in config.under_stores.items():
        if url == prefix or url.startswith(prefix.rstrip("/") + "/"):
            return target.rstrip("/") + url[len(prefix.rstrip("/")) :]
    return None


def open_door(url: str, config: StorageConfig) -> Door:
    """The door at a folder or URL, without layers. Raises UserError as `open_store` does."""
    if "://" in url and CREDENTIALS.search(url):
        # A config is copied to the run folder and shown in reports.
        shown = url.partition("://")[0]
        raise UserError(f"a {shown}:// URL holds credentials or a query; give them by environment or provider files")
    protocol = urlsplit(url).scheme if "://" in url else ""
    profile = next((name for prefix, name in config.profiles.items() if url.startswith(prefix)), None)
    if protocol in ("alluxio", "alluxio+etcd"):
        target = under_store_url(url, config)
        if target is None:
            raise UserError(f"{url} needs its under-store: set storage.under_stores to {{{url}: s3://BUCKET/PATH}}")
        return AlluxioStore(
            url,
            NamedWorkers(url) if protocol == "alluxio" else EtcdWorkers(url, config.alluxio_cluster),
            open_door(target, config),
            page_bytes=config.alluxio_page_bytes,
            timeout_seconds=config.timeout_seconds,
            load_timeout_seconds=config.deadline_seconds,
        )
    if protocol == "alluxio+s3":
        return open_alluxio_s3(url, config, profile)
    if protocol == "s3":
        return _watched(open_s3(url, config, profile), config)
    if protocol in ("http", "https") and urlsplit(url).hostname not in config.http_hosts:
        raise UserError(f"{url}: {urlsplit(url).hostname} is not among storage.http_hosts; add it if you trust it")
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"cannot open {url!r}: {error}; give a local folder or a URL that fsspec can open") from None
    if not isinstance(filesystem, LocalFileSystem):
        return _watched(FsspecStore(url, filesystem, root), config)
    folder = Path(root)
    if not is_alluxio_mount(folder):
        return PosixStore(url, folder)
    return _watched(PosixStore(url, folder, tier="alluxio"), config)


def _watched(door: Door, config: StorageConfig) -> Door:
    return WatchedDoor(door, config.timeout_seconds, config.max_abandoned_reads)


def _with_layers(door: Door, config: StorageConfig, *, fail_fast: bool) -> Store:
    is_disk = door.tier == "disk"
    batched = BatchedReads(
        door,
        # A request to a local disk costs less than handing it to a thread, and than taking a joined one apart.
        threads=1 if is_disk else config.read_threads,
        max_gap=0 if is_disk else config.coalesce_gap_mib * MIB,
        max_length=config.request_mib * MIB,
    )
    verified = VerifiedReads(batched)
    if is_disk:  # a local disk that fails does not heal in a minute
        return verified
    host = urlsplit(door.url).netloc if "://" in door.url else door.url
    return RetriedReads(
        verified,
        deadline_seconds=config.fallback_after_seconds if fail_fast else config.deadline_seconds,
        breaker=breaker_of(host),
        fail_fast=fail_fast,
    )
