"""Ranged GETs of which every length is checked."""

import urllib3

from ttv_train.storage.failures import DamagedReadError, HttpStatusError, as_os_error

MAX_CONNECTIONS = 32


def make_pool(timeout_seconds: float) -> urllib3.PoolManager:
    """Connections that are kept open. Nothing is retried here; the retry layer does that, and counts it."""
    return urllib3.PoolManager(
        num_pools=64,
        maxsize=MAX_CONNECTIONS,
        timeout=urllib3.Timeout(connect=min(5.0, timeout_seconds), read=timeout_seconds),
        retries=urllib3.Retry(connect=0, read=0, status=0, other=0, redirect=3, raise_on_redirect=True),
    )


def get_bytes(
    pool: urllib3.PoolManager, url: str, offset: int, length: int | None, headers: dict[str, str] | None = None
) -> bytes:
    """`length` bytes from `offset`, or fewer where the object ends; None reads to the end.

    Raises:
        FileNotFoundError, PermissionError, HttpStatusError: the server says so.
        DamagedReadError: the body is shorter than announced, or longer than asked for.
        OSError: the connection failed.
    """
    end = "" if length is None else str(offset + length - 1)
    wants_range = offset > 0 or length is not None
    wanted = {"Range": f"bytes={offset}-{end}"} if wants_range else {}
    try:
        response = pool.request("GET", url, headers={**(headers or {}), **wanted})
    except urllib3.exceptions.IncompleteRead as error:
        raise DamagedReadError("short", f"the connection broke: {error}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _unwrapped(error) from None
    check_status(response, url)
    if response.status == 416:
        return b""
    content = bytes(response.data)
    if wants_range and response.status == 200:  # a server that does not know ranges has sent everything
        content = content[offset:] if length is None else content[offset : offset + length]
    if length is not None and len(content) > length:
        raise DamagedReadError("long", f"{len(content)} bytes came of {length} asked for")
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
