"""What an error says of a step that no server answered."""

from __future__ import annotations

import time

import pytest
from redis.exceptions import ResponseError

from gym_capture_redis.failures import Failures
from gym_capture_redis.faults import NotSettledError
from gym_capture_redis.settings import SourceSettings
from gym_capture_redis.subject import Subject


@pytest.mark.parametrize("last", [None, OSError("gone"), NotSettledError(time.monotonic() + 60.0)])
@pytest.mark.parametrize("sent", [False, True])
def test_nothing_is_said_to_be_unchanged_once_a_step_was_sent(last: Exception | None, *, sent: bool) -> None:
    failures = Failures(SourceSettings.build("redis://server", "run", {}))
    said = str(failures.no_answer(Subject("r"), last, sent=sent))
    assert ("nothing changed" in said) is not sent
    assert ("may or may not have been applied" in said) is sent
    assert ("try again in " in said) is isinstance(last, NotSettledError)


@pytest.mark.parametrize("sent_before", [False, True])
def test_a_refusal_says_so_if_an_earlier_attempt_may_have_been_applied(*, sent_before: bool) -> None:
    failures = Failures(SourceSettings.build("redis://server", "run", {}))
    error = failures.final(
        ResponseError("OOM command not allowed"), Subject("r", "c"), sent_before=sent_before
    )
    assert "nothing was stored by it" in str(error)
    assert ("an earlier attempt may have been applied" in str(error)) is sent_before
    assert (error.rollout_id, error.model_call_id) == ("r", "c")
