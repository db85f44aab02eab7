"""A server that comes back without acknowledged steps is found out; one that lost nothing is left alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gym_capture_redis import attempts
from gym_capture_redis.attempts import REMEMBERED_S, AttemptMemory
from gym_capture_redis.scripts import Reply

CLOCK_S = 1_000.0


def reply(incarnation: str = "first", seq: int = 5, run_id: str = "server-1", code: str = "SAME") -> Reply:
    return Reply(code, incarnation, seq, 1, (), run_id)


def memory_after(*replies: Reply) -> AttemptMemory:
    memory = AttemptMemory()
    for earlier in replies:
        assert not memory.has_lost("r", earlier)
        memory.note("r", earlier)
    return memory


def test_the_first_reply_of_a_rollout_is_no_loss() -> None:
    assert not AttemptMemory().has_lost("r", reply())


@pytest.mark.parametrize(
    ("later", "lost"),
    [
        ({"seq": 6}, False),
        ({"seq": 5}, False),
        ({"seq": 4}, True),
        ({"seq": 0}, True),
        ({"incarnation": "second", "seq": 1}, True),
        ({"incarnation": "second", "seq": 9}, True),
        ({"incarnation": "", "seq": 0}, True),
    ],
)
def test_another_server_must_know_the_attempt_and_all_its_steps(later: dict[str, Any], lost: bool) -> None:
    assert memory_after(reply()).has_lost("r", reply(run_id="server-2", **later)) == lost


@pytest.mark.parametrize(("seq", "lost"), [(7, False), (6, False), (5, True), (1, True)])
def test_an_accepted_step_counts_itself_and_does_not_hide_that_one_was_lost(seq: int, lost: bool) -> None:
    accepted = reply(seq=seq, run_id="server-2", code="OK")
    assert memory_after(reply(seq=5)).has_lost("r", accepted) == lost


@pytest.mark.parametrize("later", [{"seq": 4}, {"seq": 6}, {"incarnation": "second", "seq": 1}])
def test_on_the_same_server_replies_may_come_in_any_order_and_ids_may_begin_again(
    later: dict[str, Any],
) -> None:
    assert not memory_after(reply()).has_lost("r", reply(**later))


def test_an_older_reply_that_comes_later_does_not_lower_what_was_acknowledged() -> None:
    memory = memory_after(reply(seq=5), reply(seq=3))
    assert memory.has_lost("r", reply(seq=4, run_id="server-2"))


def test_a_new_attempt_on_the_same_server_is_what_counts_from_then_on() -> None:
    memory = memory_after(reply(seq=5), reply("second", seq=1))
    assert not memory.has_lost("r", reply("second", seq=2, run_id="server-2"))


def test_a_loss_is_told_until_it_is_noted_that_it_was_dealt_with() -> None:
    memory = memory_after(reply())
    forgetful = reply("second", seq=1, run_id="server-2")
    assert memory.has_lost("r", forgetful)
    assert memory.has_lost("r", forgetful)
    memory.note("r", forgetful)
    assert not memory.has_lost("r", forgetful)
    assert memory.has_lost("r", reply("second", seq=0, run_id="server-3"))


def test_the_newest_step_of_ones_own_is_remembered_whatever_comes_after_it() -> None:
    memory = AttemptMemory()
    memory.note("r", reply(seq=4, code="OK"), b"n:a")
    memory.note("r", reply(seq=6, code="OK"), b"r:a")
    memory.note("r", reply(seq=5, code="OK"), b"n:b")
    memory.note("r", reply(seq=9), b"n:a")
    memory.note("r", reply(seq=8, run_id="server-2"))
    position = memory.position("r")
    assert position is not None
    assert (position.seq, position.own_seq, position.own_trace) == (8, 6, b"r:a")
    memory.note("r", reply("second", seq=1, code="OK"), b"n:c")
    position = memory.position("r")
    assert position is not None
    assert (position.seq, position.own_seq, position.own_trace) == (1, 1, b"n:c")


def test_rollouts_are_remembered_apart() -> None:
    memory = memory_after(reply(seq=5))
    assert not memory.has_lost("other", reply(seq=1, run_id="server-2"))


@pytest.mark.parametrize(("after_s", "lost"), [(REMEMBERED_S - 1, True), (REMEMBERED_S + 1, False)])
def test_after_a_long_time_another_attempt_is_no_surprise(
    monkeypatch: pytest.MonkeyPatch, after_s: float, lost: bool
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: CLOCK_S)
    memory = memory_after(reply())
    monkeypatch.setattr(time, "monotonic", lambda: CLOCK_S + after_s)
    assert memory.has_lost("r", reply("second", seq=1, run_id="server-2")) == lost


def test_an_announcement_is_remembered_for_its_call_alone() -> None:
    memory = AttemptMemory()
    first, second = reply(), reply("second", seq=1)
    memory.announce("r", "c", first)
    assert memory.announcement("r", "c") is first
    assert memory.announcement("r", "other") is None
    assert memory.announcement("other", "c") is None
    memory.announce("r", "c", second)
    assert memory.announcement("r", "c") is second


def test_the_oldest_are_forgotten_first_and_use_makes_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MAX_REMEMBERED", 2)
    memory = AttemptMemory()
    for call in ("a", "b", "a", "c"):
        memory.announce("r", call, reply())
    assert [call for call in "abc" if memory.announcement("r", call)] == ["a", "c"]

    for rollout, seq in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
        assert not memory.has_lost(rollout, reply(seq=seq))
        memory.note(rollout, reply(seq=seq))
    forgetful = reply("second", seq=1, run_id="server-2")
    assert memory.has_lost("a", forgetful)
    assert not memory.has_lost("b", forgetful)
