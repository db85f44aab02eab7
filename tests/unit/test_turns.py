"""Threads that take turns share what they send, keep their deadlines, and leave nobody waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis.exceptions import TimeoutError as NoReplyError

from gym_capture_redis.batches import MAX_BATCH_BYTES, MAX_BATCH_CALLS
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.turns import Job, Turns, in_order

PATIENCE_S = 30.0
THREADS = 32


class Server:
    """Answers each step with its key, once it is open."""

    def __init__(self, count: int = 1) -> None:
        self.turns = Turns(count, self.send)
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.batches: list[list[bytes]] = []
        self.at_work = 0
        self.most_at_work = 0
        self.raises: list[BaseException] = []
        self._lock = threading.Lock()

    def send(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
            self.batches.append([step.call.key for job in jobs for step in job.steps])
            error = self.raises.pop() if self.raises else None
        self.begun.release()
        try:
            if error is not None:
                raise error
            assert self.open.wait(PATIENCE_S)
            for job in jobs:
                for step in job.steps:
                    step.answer = Reply(step.call.key.decode(), "", 0, 0, ())
        finally:
            with self._lock:
                self.at_work -= 1

    def ask(self, *names: str, timeout_s: float = PATIENCE_S, nbytes: int = 0) -> list[Any]:
        calls = [Call(Step.PEEK, name.encode(), (bytes(nbytes),)) for name in names]
        job = Job(calls, by_source=False, asking=False, deadline=time.monotonic() + timeout_s)
        return [answer.code if isinstance(answer, Reply) else answer for answer in self.turns.run(job)]

    def wait_for(self, jobs: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.turns._waiting) != jobs:
            assert time.monotonic() < deadline, f"{len(self.turns._waiting)} wait"
            time.sleep(0.001)


def test_steps_that_come_while_a_turn_is_taken_are_sent_together() -> None:
    server = Server()
    with ThreadPoolExecutor(THREADS) as threads:
        first = threads.submit(server.ask, "first")
        assert server.begun.acquire(timeout=PATIENCE_S)
        others = [threads.submit(server.ask, f"a{number}", f"b{number}") for number in range(THREADS - 1)]
        server.wait_for(THREADS - 1)
        server.open.set()
        assert first.result() == ["first"]
        for number, other in enumerate(others):
            assert other.result() == [f"a{number}", f"b{number}"]
    assert [len(batch) for batch in server.batches] == [1, 2 * (THREADS - 1)]


def test_a_batch_is_bounded_in_steps_and_in_bytes() -> None:
    server = Server()
    large = MAX_BATCH_BYTES // 2 + 1
    with ThreadPoolExecutor(MAX_BATCH_CALLS + 8) as threads:
        waiting = [threads.submit(server.ask, "first")]
        assert server.begun.acquire(timeout=PATIENCE_S)
        for number in range(4):
            waiting.append(threads.submit(server.ask, f"large{number}", nbytes=large))
            server.wait_for(number + 1)
        for number in range(MAX_BATCH_CALLS + 3):
            waiting.append(threads.submit(server.ask, f"small{number}"))
            server.wait_for(number + 5)
        server.open.set()
        for each in waiting:
            assert len(each.result()) == 1
    assert [len(batch) for batch in server.batches] == [1, 2, 2, MAX_BATCH_CALLS, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_threads_send_than_there_are_turns_and_all_are_answered(count: int) -> None:
    server = Server(count)
    server.open.set()

    def work(number: int) -> None:
        for turn in range(50):
            assert server.ask(f"{number}.{turn}") == [f"{number}.{turn}"]

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    assert sum(map(len, server.batches)) == 50 * THREADS
    assert server.most_at_work <= count
    assert server.turns._free == count
    assert not server.turns._waiting


def test_who_waits_too_long_leaves_and_is_not_sent() -> None:
    server = Server()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(server.ask, "first")
        assert server.begun.acquire(timeout=PATIENCE_S)
        (answer,) = server.ask("late", timeout_s=0.05)
        assert isinstance(answer, NoReplyError)
        other = threads.submit(server.ask, "other")
        server.wait_for(1)
        server.open.set()
        assert first.result() == ["first"]
        assert other.result() == ["other"]
    assert server.batches == [[b"first"], [b"other"]]


def test_a_thread_that_is_interrupted_while_it_sends_leaves_the_turn_to_others() -> None:
    server = Server()
    server.raises.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        server.ask("first")
    server.open.set()
    assert server.ask("next") == ["next"]


@pytest.mark.parametrize("has_turn", [False, True])
def test_a_thread_that_is_interrupted_while_it_waits_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch, has_turn: bool
) -> None:
    server = Server()
    wait = threading.Event.wait

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        if event is server.open:
            return wait(event, timeout)
        if has_turn:
            server.open.set()
            wait(event, timeout)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(server.ask, "first")
        assert server.begun.acquire(timeout=PATIENCE_S)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Event, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                server.ask("second")
        server.open.set()
        assert first.result() == ["first"]
    assert server.ask("third") == ["third"]
    assert server.batches == [[b"first"], [b"third"]]


def test_parts_come_before_what_needs_them_and_all_else_keeps_its_order() -> None:
    def job(*steps: Step) -> Job:
        calls = [Call(step, f"{number}".encode(), ()) for number, step in enumerate(steps)]
        return Job(calls, by_source=False, asking=False, deadline=0.0)

    ordered = in_order([job(Step.PUT), job(Step.STAGE, Step.STAGE, Step.PUT), job(Step.PEEK)])
    assert [(step.call.step, step.call.key) for step in ordered] == [
        (Step.STAGE, b"0"),
        (Step.STAGE, b"1"),
        (Step.PUT, b"0"),
        (Step.PUT, b"2"),
        (Step.PEEK, b"0"),
    ]
