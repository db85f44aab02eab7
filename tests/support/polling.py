"""Waiting for what other processes do: polled, and bounded by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

INTERVAL_S = 0.02


def wait_until(happened: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Ask again and again; a server that does not answer has not come so far yet.

    Raises:
        TimeoutError: it did not happen in time; ``what`` says what was waited for.

    """
    deadline = time.monotonic() + timeout_s
    last: Exception | None = None
    while time.monotonic() < deadline:
        try:
            if happened():
                return
        except (redis.exceptions.RedisError, OSError) as error:
            last = error
        time.sleep(INTERVAL_S)
    raise TimeoutError(f"within {timeout_s:g} s it did not happen that {what} (last error: {last!r})")
