"""How long a step waits before it is sent again."""

from __future__ import annotations

import time

from gym_capture_redis.faults import NotSettledError, is_transient
from gym_capture_redis.retry import Backoff


def test_a_step_for_which_the_server_is_too_young_waits_until_it_is_not() -> None:
    backoff = Backoff()
    error = NotSettledError(time.monotonic() + 60.0)
    assert is_transient(error)
    assert 50.0 < backoff.after(error) <= 60.0
    assert NotSettledError(time.monotonic() - 1.0).left_s == 0.0
    assert backoff.last is error
