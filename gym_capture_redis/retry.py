"""How long to wait before a step is sent again."""

from __future__ import annotations

import random

from gym_capture_redis.faults import NotSettledError, is_redirection

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 1.0

_SHORTEST_ATTEMPT_S = 1.0
_ATTEMPTS_IN_A_DEADLINE = 4
_SLOWEST_BYTES_PER_S = 10 * 2**20


def attempt_s(left_s: float, *, timeout_s: float, nbytes: int) -> float:
    """How long one attempt may take: a connection that fell silent must leave time for another."""
    share_s = max(_SHORTEST_ATTEMPT_S, timeout_s / _ATTEMPTS_IN_A_DEADLINE)
    return min(left_s, share_s + nbytes / _SLOWEST_BYTES_PER_S)


class Backoff:
    """Full jitter, longer after every failure; no pause before a redirection is followed. ``last``: error."""

    def __init__(self) -> None:
        self.last: BaseException | None = None
        self._longest_pause_s = _FIRST_PAUSE_S

    def after(self, error: BaseException) -> float:
        """How long to pause, in seconds, now that this happened."""
        at_once = is_redirection(error) and not (self.last and is_redirection(self.last))
        self.last = error
        if at_once:
            return 0.0
        if isinstance(error, NotSettledError):
            return error.left_s
        pause_s = random.uniform(0, self._longest_pause_s)  # noqa: S311 - jitter
        self._longest_pause_s = min(2 * self._longest_pause_s, _LONGEST_PAUSE_S)
        return pause_s
