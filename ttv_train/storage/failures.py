"""How storage fails: the errors that layers tell apart, and the kinds under which they are counted."""

import os
import re

CREDENTIAL_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL")


class DamagedReadError(OSError):
    """An answer that is not what was written. `kind` is ``short``, ``long`` or ``corrupt``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class HttpStatusError(OSError):
    """A server answered with an error status."""

    def __init__(self, status: int, url: str) -> None:
        super().__init__(f"HTTP {status} from {url}")
        self.status = status


class CircuitOpenError(OSError):
    """A host that has failed repeatedly is not asked for a while."""


class StoreUnavailableError(OSError):
    """A read that failed until its deadline; what is stored may be in order."""


def kind_of(error: OSError) -> str:
    """A short name of what went wrong, for the counters."""
    match error:
        case DamagedReadError():
            return error.kind
        case HttpStatusError():
            return f"http_{error.status}"
        case CircuitOpenError():
            return "circuit_open"
        case FileNotFoundError():
            return "not_found"
        case PermissionError():
            return "denied"
        case TimeoutError():
            return "timeout"
        case ConnectionError():
            return "connection"
    return "io"


def is_transient(error: OSError) -> bool:
    """Whether the same read may succeed later."""
    if isinstance(error, HttpStatusError):
        return error.status in (408, 425, 429) or error.status >= 500
    return not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError)


def scrub(text: str) -> str:
    """`text` on one line without the values of environment variables that hold credentials."""
    for name, value in os.environ.items():
        if len(value) >= 8 and CREDENTIAL_VARIABLE.search(name.upper()):
            text = text.replace(value, "***")
    return " ".join(text.split())


def as_os_error(error: Exception) -> OSError:
    """What a client library raised, as an OSError without credentials in its message."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return error
    message = scrub(f"{type(error).__name__}: {error}")
    name = type(error).__name__.lower()
    if isinstance(error, TimeoutError) or "timeout" in name:
        return TimeoutError(message)
    if isinstance(error, ConnectionError) or "connect" in name or "payload" in name or "disconnected" in name:
        return ConnectionError(message)
    return OSError(message)
