"""How long a step waits before it is sent again."""

from __future__ import annotations

from gym_capture_redis.faults import NotSettledError, is_transient
from gym_capture_redis.retry import Backoff


def test_a_step_for_which_the_server_is_too_young_waits_until_it_is_not() -> None:
    backoff = Backoff()
    error = NotSettledError(3.5)
    assert is_transient(error)
    assert backoff.after(error) == 3.5
    assert backoff.last is error
