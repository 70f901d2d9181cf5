"""Requests of which every length is checked, and which end in time."""

import time

import urllib3

from ttv_train.storage.failures import DamagedReadError, HttpStatusError, as_os_error

MAX_CONNECTIONS = 32
CHUNK_BYTES = 2**17
"""Of one look at the socket, which seldom has more."""


class HttpClient:
    """Connections that are kept open. Nothing is retried here; the retry layer does that, and counts it.

    Args:
        timeout_seconds: of a whole request: a server that sends a byte now and then does not hold it up for ever.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._pool = urllib3.PoolManager(
            num_pools=64,
            maxsize=MAX_CONNECTIONS,
            timeout=urllib3.Timeout(connect=min(5.0, timeout_seconds), read=timeout_seconds),
            retries=urllib3.Retry(connect=0, read=0, status=0, other=0, redirect=3, raise_on_redirect=True),
        )

    def get(
        self, url: str, offset: int = 0, length: int | None = None, headers: dict[str, str] | None = None
    ) -> bytearray:
        """`length` bytes from `offset`, or fewer where the object ends; None reads to the end.

        Raises:
            FileNotFoundError, PermissionError, HttpStatusError: the server says so.
            DamagedReadError: the body is shorter than announced, or longer than asked for.
            OSError: the connection failed, or the answer took too long.
        """
        end = "" if length is None else str(offset + length - 1)
        wants_range = offset > 0 or length is not None
        wanted = {"Range": f"bytes={offset}-{end}"} if wants_range else {}
        status, content = self._request("GET", url, {**(headers or {}), **wanted})
        if status == 416:
            return bytearray()
        if wants_range and status == 200:  # a server that does not know ranges has sent everything
            content = content[offset:] if length is None else content[offset : offset + length]
        if length is not None and len(content) > length:
            raise DamagedReadError("long", f"{len(content)} bytes came of {length} asked for")
        return content

    def post(self, url: str, json_body: bytes) -> bytearray:
        """What the server answers. Raises OSError as `get` does."""
        return self._request("POST", url, {"Content-Type": "application/json"}, json_body)[1]

    def _request(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[int, bytearray]:
        try:
            response = self._pool.request(method, url, headers=headers, body=body, preload_content=False)
            content = self._body(response, url)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _unwrapped(error) from None
        check_status(response, url)
        return response.status, content

    def _body(self, response: urllib3.BaseHTTPResponse, url: str) -> bytearray:
        deadline = time.monotonic() + self._timeout_seconds
        parts = []
        try:
            # One read of the socket at a time, so that the clock is looked at between two of them.
            while part := response.read1(CHUNK_BYTES):
                parts.append(part)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{url} did not answer completely in {self._timeout_seconds:g} s")
            announced = response.headers.get("Content-Length")
            content = bytearray().join(parts)
            if announced is not None and announced.isdigit() and len(content) != int(announced):
                raise DamagedReadError("short", f"the connection broke: {len(content)} bytes came of {announced}")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return content


def check_status(response: urllib3.BaseHTTPResponse, url: str) -> None:
    """Raises OSError for an error status, except 416: nothing lies behind the end of an object."""
    if response.status == 404:
        raise FileNotFoundError(url)
    if response.status in (401, 403):
        raise PermissionError(f"HTTP {response.status} from {url}")
    if response.status >= 400 and response.status != 416:
        raise HttpStatusError(response.status, url)


def _unwrapped(error: Exception) -> OSError:
    """urllib3 wraps what happened in what it was doing."""
    if isinstance(error, DamagedReadError | TimeoutError):
        return error
    cause = error
    while isinstance(reason := getattr(cause, "reason", None), Exception):
        cause = reason
    if isinstance(cause, urllib3.exceptions.IncompleteRead) or any(
        isinstance(argument, urllib3.exceptions.IncompleteRead) for argument in cause.args
    ):
        return DamagedReadError("short", f"the connection broke: {cause}")
    if isinstance(cause, urllib3.exceptions.NewConnectionError):
        return ConnectionRefusedError(str(cause))
    if isinstance(cause, urllib3.exceptions.ProtocolError):
        return ConnectionError(str(cause))
    return as_os_error(cause)
