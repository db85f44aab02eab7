"""The stopwatch of the benchmark: whose time it is, and that nothing is left in the functions watched."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

pytest.importorskip("typer")

from gym_capture_redis.cli.bench import stopwatch
from gym_capture_redis.cli.bench.measures import time_spent
from gym_capture_redis.cli.bench.stopwatch import (
    LapCost,
    Spent,
    Split,
    Splitting,
    Stopwatch,
    Watched,
    split_up,
)

FREE = LapCost(0, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One that goes on only by hand, in nanoseconds."""
    now = [0]
    monkeypatch.setattr(stopwatch, "_clock", lambda: now[0])
    return now


class Work:
    """Something to watch."""

    def __init__(self, clock: list[int]) -> None:
        self.clock = clock

    def outer(self) -> str:
        self.clock[0] += 10
        self.inner()
        self.clock[0] += 1
        return "outer"

    def inner(self) -> None:
        self.clock[0] += 100

    async def waits(self, event: asyncio.Event) -> str:
        self.clock[0] += 1_000
        await event.wait()
        self.clock[0] += 2_000
        return "waited"

    async def fails(self, event: asyncio.Event) -> None:
        try:
            await event.wait()
        finally:
            self.clock[0] += 5

    @classmethod
    def of_class(cls) -> type[Work]:
        return cls


WATCHED = [Watched(Work, name, name) for name in ("outer", "inner", "waits", "fails", "of_class")]


def test_a_part_stands_still_while_it_calls_another(clock: list[int]) -> None:
    watch = Stopwatch()
    with watch.watching(WATCHED, "collector"):
        assert Work(clock).outer() == "outer"
        Work(clock).inner()

    assert watch.spent() == {"outer": Spent(11, 1, 1), "inner": Spent(200, 2, 0)}


async def test_the_clock_stands_still_while_a_coroutine_waits(clock: list[int]) -> None:
    watch, event = Stopwatch(), asyncio.Event()
    with watch.watching(WATCHED, "collector"):
        task = asyncio.create_task(Work(clock).waits(event))
        await asyncio.sleep(0)
        clock[0] += 50_000
        event.set()
        assert await task == "waited"

    assert watch.spent() == {"waits": Spent(3_000, 2, 0)}


async def test_a_coroutine_may_be_cancelled(clock: list[int]) -> None:
    watch = Stopwatch()
    with watch.watching(WATCHED, "collector"):
        task = asyncio.create_task(Work(clock).fails(asyncio.Event()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert watch.spent() == {"fails": Spent(5, 2, 0)}


def test_threads_do_not_stop_each_other(clock: list[int]) -> None:
    watch = Stopwatch()
    with watch.watching(WATCHED, "collector"):
        watch.begin("main")
        thread = threading.Thread(target=Work(clock).inner)
        thread.start()
        thread.join()
        watch.end()

    assert watch.spent() == {"main": Spent(100, 1, 0), "inner": Spent(100, 1, 0)}


def test_the_collector_is_a_part() -> None:
    watch = Stopwatch()
    with watch.watching([], "collector"):
        watch.begin("outer")
        gc.collect()
        watch.end()

    assert watch.spent()["collector"].laps == watch.spent()["outer"].inner_laps > 0


@pytest.mark.parametrize("error", [None, RuntimeError("at work")], ids=["well", "ill"])
def test_nothing_is_left_in_what_was_watched(error: Exception | None) -> None:
    before, callbacks = dict(vars(Work)), list(gc.callbacks)

    def work() -> None:
        with Splitting(WATCHED, "collector", FREE):
            assert vars(Work)["outer"] is not before["outer"]
            assert Work.of_class() is Work
            if error:
                raise error

    if error:
        with pytest.raises(RuntimeError, match="at work"):
            work()
    else:
        work()

    assert dict(vars(Work)) == before
    assert gc.callbacks == callbacks


def test_what_does_not_exist_is_not_watched() -> None:
    before = dict(vars(Work))
    with (
        pytest.raises(KeyError, match="gone"),
        Stopwatch().watching([*WATCHED, Watched(Work, "gone", "")], ""),
    ):
        pytest.fail("nothing is watched")

    assert dict(vars(Work)) == before


def test_noting_is_taken_off() -> None:
    spent = {"outer": Spent(10_000, 10, 20), "inner": Spent(3_000, 20, 0)}
    split = split_up(1.0, 100e-6, spent, LapCost(inside_ns=50, outside_ns=100))

    assert split.parts_s == pytest.approx({"outer": (10_000 - 500 - 2_000) / 1e9, "inner": 2_000 / 1e9})
    assert split.rest_s == pytest.approx((100_000 - 13_000 - 10 * 100) / 1e9)
    assert split.noting_s == pytest.approx(30 * 150 / 1e9)
    total = sum(split.parts_s.values()) + split.rest_s + split.noting_s + split.waiting_s
    assert total == pytest.approx(split.wall_s)


def test_no_part_is_negative() -> None:
    split = split_up(1.0, 2.0, {"outer": Spent(10, 10, 0)}, LapCost(inside_ns=1e9, outside_ns=1e9))

    assert (split.parts_s, split.rest_s, split.waiting_s) == ({"outer": 0}, 0, 0)


def test_noting_costs_something() -> None:
    cost = LapCost.measured()

    assert cost.inside_ns > 0
    assert cost.outside_ns >= 0


def test_shares_are_those_of_a_call() -> None:
    split = Split(wall_s=10.0, cpu_s=7.0, parts_s={"a": 4.0, "b": 1.0}, rest_s=2.0, noting_s=0.0)
    names: Any = ("a", "b", "c", time_spent.REST, time_spent.WAITING)
    spent = time_spent.spent_on(split, names, server_s=5.0, calls=10)

    assert spent.parts == {"a": 4e5, "b": 1e5, "c": 0, time_spent.REST: 2e5, time_spent.WAITING: 3e5}
    assert spent.shares["a"] == pytest.approx(0.4)
    assert (spent.server, spent.overlap) == pytest.approx((5e5, 2e5))
