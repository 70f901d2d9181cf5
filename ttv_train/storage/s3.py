"""S3 and services that speak it, through s3fs; Alluxio's S3 API with its addresses filled in.

``alluxio+s3://host:39999/bucket/path`` is the proxy of Alluxio 2.9, whose API lies under ``/api/v1/s3``; a proxy on
another port is given with that path: ``alluxio+s3://host:8080/api/v1/s3/bucket/path``. Any other port is the S3 API of
a worker of 3.x (29998). Alluxio takes the user's name for the access key and checks no secret; where a deployment does,
`storage.profiles` names the AWS profile that holds them.
"""

import getpass
from typing import Any
from urllib.parse import urlsplit

from ttv_train.config import StorageConfig
from ttv_train.errors import UserError
from ttv_train.storage.base import Door
from ttv_train.storage.fsspec_store import FsspecStore
from ttv_train.storage.http_client import HttpClient
from ttv_train.storage.ranges import Content

PROXY_PORT = 39999
PROXY_PATH = "/api/v1/s3"
CHECKSUMS = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
"""S3 services other than Amazon's do not know the checksums that botocore adds of its own accord."""


def open_s3(url: str, config: StorageConfig, profile: str | None) -> Door:
    """The door at ``s3://bucket/path``. Endpoint and credentials come from the environment or from `profile`."""
    filesystem = _filesystem(config, profile=profile)
    return FsspecStore(url, filesystem, url.removeprefix("s3://").rstrip("/"))


def open_alluxio_s3(url: str, config: StorageConfig, profile: str | None) -> Door:
    """The door at ``alluxio+s3://host:port/bucket/path``.

    Raises:
        UserError: host, port or bucket is missing.
    """
    parts = urlsplit(url)
    is_proxy = parts.port == PROXY_PORT or parts.path.startswith(PROXY_PATH + "/")
    root = parts.path.removeprefix(PROXY_PATH).strip("/")
    if not parts.hostname or not parts.port or not root:
        raise UserError(f"{url!r} is not alluxio+s3://HOST:PORT/BUCKET/PATH; the port is 39999 (2.9) or 29998 (3.x)")
    endpoint = f"http://{parts.hostname}:{parts.port}{PROXY_PATH if is_proxy else ''}"
    keys = {} if profile else {"key": getpass.getuser(), "secret": "none"}
    filesystem = _filesystem(config, profile=profile, endpoint_url=endpoint, **keys)
    return AlluxioS3Store(url, filesystem, root, endpoint, config.timeout_seconds, signs=profile is not None)


class AlluxioS3Store(FsspecStore):
    """Reads with plain ranged requests, which follow a worker's redirect to the owner of the data and cost a fraction
    of s3fs; everything else goes through s3fs. With an AWS profile reads are signed, and s3fs does them too."""

    def __init__(
        self, url: str, filesystem: Any, root: str, endpoint: str, timeout_seconds: float, *, signs: bool
    ) -> None:
        super().__init__(url, filesystem, root, tier="alluxio")
        self._endpoint, self._signs = endpoint, signs
        self._client = HttpClient(timeout_seconds)
        self._unfinished: set[str] = set()
        self._headers = {
            "Authorization": f"AWS4-HMAC-SHA256 Credential={getpass.getuser()}/20200101/us-east-1/s3/aws4_request, "
            "SignedHeaders=host, Signature=none"
        }

    def read(self, name: str, offset: int = 0, length: int | None = None) -> Content:
        """See `Store.read`."""
        if self._signs:
            return super().read(name, offset, length)
        if length == 0:
            return b""
        url = f"{self._endpoint}/{self._path(name)}"
        return self._client.get(url, offset, length, self._headers)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """See `Store.put_if_absent`. Alluxio does not know ``If-None-Match``: between two writers that look at the same
        moment, the later one wins. So does this one when its last attempt failed: a write during which a worker died
        may have left a name and a length without bytes, which would be waited for in vain."""
        if name not in self._unfinished and self.exists(name):
            return False
        self._unfinished.add(name)
        self.put(name, data)
        self._unfinished.discard(name)
        return True

    def delete_folder(self, name: str) -> None:
        """See `Store.delete_folder`."""
        try:
            super().delete_folder(name)
        except OSError:
            # The proxy of 2.9 refuses to delete several objects in one request.
            for path in self._filesystem.find(self._path(name)):
                self._filesystem.rm_file(path)


def _filesystem(config: StorageConfig, profile: str | None, **options: Any) -> Any:
    try:
        import s3fs
    except ImportError:
        raise UserError("s3:// and alluxio+s3:// need s3fs: pip install 'ttv-train[s3]'") from None
    return s3fs.S3FileSystem(
        profile=profile,
        config_kwargs={
            "connect_timeout": config.timeout_seconds,
            "read_timeout": config.timeout_seconds,
            # Our own layer retries, and counts it.
            "retries": {"max_attempts": 0},
            "s3": {"addressing_style": "path"} if "endpoint_url" in options else {},
            **CHECKSUMS,
        },
        use_listings_cache=False,
        default_cache_type="none",
        **options,
    )
