"""What an exception of redis-py means: try again, or the one of our errors to raise."""

from __future__ import annotations

import ssl
import time

from redis import exceptions as redis_errors

from gym_capture_redis.errors import (
    BackendUnavailableError,
    CaptureError,
    ConfigurationError,
    CorruptRecordError,
    UnsupportedFormatError,
)


class NotConfirmedError(Exception):
    """The step was applied, but nothing confirmed its fsync, or its copies on replicas."""


class NotSettledError(Exception):
    """The server came back a moment ago, and workers may still be putting back what it forgot.

    The step was not sent; it must wait until ``settles_at_s`` (``time.monotonic``).
    """

    def __init__(self, settles_at_s: float) -> None:
        super().__init__(settles_at_s)
        self._settles_at_s = settles_at_s

    @property
    def left_s(self) -> float:
        """For how long from now on."""
        return max(0.0, self._settles_at_s - time.monotonic())


_TRY_AGAIN_CODES = frozenset(
    (
        "LOADING",
        "BUSY",
        "READONLY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "MOVED",
        "ASK",
        "NOREPLICAS",
        "MISCONF",
    )
)
_TRY_AGAIN = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.ClusterError,
    redis_errors.TryAgainError,
    redis_errors.AskError,
    redis_errors.InvalidResponse,
    NotConfirmedError,
    NotSettledError,
    OSError,
)
_KILLED = "Script killed"
"""How the answer to a script begins that an operator stopped before it wrote anything."""

_REFUSED_CREDENTIALS = (
    redis_errors.AuthenticationError,
    redis_errors.AuthorizationError,
    redis_errors.AuthenticationWrongNumberOfArgsError,
)

_LONGEST_QUOTE = 160
_FORBIDDEN_IN_SCRIPT = ("ACL failure in script", "The user executing the script")
"""How Valkey and Redis begin what they answer when a script calls what its user may not."""

_MEANINGS: dict[str, tuple[type[CaptureError], str]] = {
    "WRONGPASS": (
        ConfigurationError,
        "refused the user or password; check the URL, username and password",
    ),
    "UNTRUSTED": (
        ConfigurationError,
        "shows a certificate that is not trusted; check the host in the URL and the setting tls",
    ),
    "NOEVAL": (ConfigurationError, "runs no Lua scripts (EVAL, EVALSHA), which atomic steps need"),
    "NODB": (ConfigurationError, "has no database of this number; choose another in the URL"),
    "OOM": (
        BackendUnavailableError,
        (
            "is out of memory and refused the write; nothing was stored by it. "
            "Raise maxmemory, or let the trainer drop what it has consumed"
        ),
    ),
    "NOPERM": (
        ConfigurationError,
        "does not permit this user the commands and keys (gymcap:*) needed; docs/operations.md lists them",
    ),
    "WRONGTYPE": (
        CorruptRecordError,
        (
            "holds a value that is no hash under this rollout's key; another program uses the same names: "
            "choose another namespace or database, or remove the key"
        ),
    ),
    "NEWER": (
        UnsupportedFormatError,
        "holds the rollout in a format newer than this version reads; upgrade gym-capture-redis here",
    ),
}


def is_transient(error: BaseException) -> bool:
    """Whether repeating the same step may succeed: the server is away, starting, or moving."""
    error = _unwrapped(error)
    if isinstance(error, (*_REFUSED_CREDENTIALS, ssl.SSLCertVerificationError)):
        return False
    if isinstance(error, redis_errors.ResponseError) and _KILLED in _text(error):
        return True
    return isinstance(error, _TRY_AGAIN) or _code(error) in _TRY_AGAIN_CODES


def is_redirection(error: BaseException) -> bool:
    """Whether a node of a Cluster named another one, which has the key or is getting it."""
    return isinstance(error, redis_errors.AskError)


def final_error(error: BaseException, server: str) -> CaptureError:
    """Our error for an exception that repeating does not cure. ``server`` is shown in the message."""
    error = _unwrapped(error)
    if isinstance(error, CaptureError):
        return error
    code = _meaning(error)
    if code in _MEANINGS:
        error_class, meaning = _MEANINGS[code]
        said = _quote(error)
        return error_class(f"{server} {meaning}{f' ({said})' if said else ''}")
    if code == "CORRUPT":
        return CorruptRecordError(
            f"{server} holds a damaged rollout: {_text(error).removeprefix('CORRUPT ')}"
        )
    return BackendUnavailableError(f"{server} refused the step: {type(error).__name__} {code}".rstrip())


def explain(error: BaseException) -> str:
    """A transient error in a few words. Connection errors quote the system; replies could quote data."""
    text = _text(error) if isinstance(error, redis_errors.ConnectionError | OSError) else _code(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def lacks_command(error: BaseException) -> bool:
    """Whether the server does not have the command at all: it may be one of another kind."""
    text = _text(error)
    return isinstance(error, redis_errors.ResponseError) and (
        "unknown command" in text.lower() or "cluster support disabled" in text
    )


def is_unknown_script(error: BaseException) -> bool:
    """Whether the server does not know the script's SHA-1 yet."""
    return isinstance(error, redis_errors.NoScriptError)


def _unwrapped(error: BaseException) -> BaseException:
    """What redis-py met while it connected, where it comes wrapped in a ConnectionError.

    That is so for what a unix connection meets in its greeting, and for a certificate that is refused.
    """
    if type(error) is not redis_errors.ConnectionError:
        return error
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return error.__context__
    return error.__cause__ if isinstance(error.__cause__, redis_errors.RedisError) else error


def _meaning(error: BaseException) -> str:
    """The key in _MEANINGS of what has one, else the error code."""
    text = _text(error)
    if isinstance(error, _REFUSED_CREDENTIALS):
        return "WRONGPASS"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "UNTRUSTED"
    if "unknown command" in text.lower():
        return "NOEVAL"
    if "db index" in text.lower():
        return "NODB"
    if isinstance(error, redis_errors.NoPermissionError) or text.startswith(_FORBIDDEN_IN_SCRIPT):
        return "NOPERM"
    return "OOM" if isinstance(error, redis_errors.OutOfMemoryError) else _code(error)


def _quote(error: BaseException) -> str:
    """The words of those that say more than their meaning, and quote no data."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return _text(error)[:_LONGEST_QUOTE] if _meaning(error) == "NOPERM" else ""


def _text(error: BaseException) -> str:
    return str(error.args[0]) if error.args else ""


def _code(error: BaseException) -> str:
    """First word of an error reply, if the exception is one; the rest could quote the command."""
    if not isinstance(error, redis_errors.ResponseError):
        return ""
    return _text(error).partition(" ")[0]
