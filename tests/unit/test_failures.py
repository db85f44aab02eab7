"""What an error says of a step that no server answered."""

from __future__ import annotations

import pytest

from gym_capture_redis.failures import Failures
from gym_capture_redis.faults import NotSettledError
from gym_capture_redis.settings import SourceSettings
from gym_capture_redis.subject import Subject


@pytest.mark.parametrize("last", [None, OSError("gone"), NotSettledError(3.0)])
@pytest.mark.parametrize("sent", [False, True])
def test_nothing_is_said_to_be_unchanged_once_a_step_was_sent(last: Exception | None, *, sent: bool) -> None:
    failures = Failures(SourceSettings.build("redis://server", "run", {}))
    said = str(failures.no_answer(Subject("r"), last, sent=sent))
    assert ("nothing changed" in said) is not sent
    assert ("may or may not have been applied" in said) is sent
    assert ("try again in 3.0 s" in said) is isinstance(last, NotSettledError)
