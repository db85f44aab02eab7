"""``token_source_factory``: a source to be made elsewhere, as in a Ray actor (contract, section 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gym_capture_redis.settings import plain, resolved_url
from gym_capture_redis.source import RedisTokenSource


class _SourceFactory:
    def __init__(self, url: str | None, arguments: dict[str, Any]) -> None:
        self._url = resolved_url(url)
        self._arguments: dict[str, Any] = plain(arguments)
        self._made = repr(self())  # refuses what no source would take, and does no I/O

    def __call__(self) -> RedisTokenSource:
        return RedisTokenSource(self._url, **self._arguments)

    def __repr__(self) -> str:
        return f"<factory of {self._made}>"


def token_source_factory(url: str | None = None, **arguments: Any) -> Callable[[], RedisTokenSource]:
    """Return what makes a ``RedisTokenSource`` of these arguments, each time that it is called.

    It can be pickled and sent to the process that reads, a Ray actor for one; a source cannot, as it holds
    connections. What is pickled contains the password, what is printed does not. ``url=None`` reads
    ``GYM_CAPTURE_REDIS_URL`` here, not there.

    Raises:
        ConfigurationError, InvalidIdentifierError: as of ``RedisTokenSource``, here and now.

    """
    return _SourceFactory(url, arguments)
