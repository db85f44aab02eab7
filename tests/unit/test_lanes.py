"""Lanes share their jobs fairly, wake as often as needed, and leave nobody waiting."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as NoReplyError

from gym_capture_redis.batches import (
    MAX_BATCH_BYTES,
    MAX_BATCH_CALLS,
    answers_of,
    grouped,
)
from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.faults import NotConfirmedError, NotSettledError
from gym_capture_redis.lanes import MIN_SHARE_CALLS, Job, Lanes, exchange
from gym_capture_redis.scripts import (
    MAX_JOINED_BYTES,
    Call,
    Dialect,
    Reply,
    Step,
    command,
    commands,
    delete,
    fetch,
    peek,
    stage,
)
from gym_capture_redis.settings import SinkSettings

PATIENCE_S = 30.0
LANES = 2


class Server:
    """Answers each call with its key, once it is open."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.scripts: list[list[tuple[str, list[bytes]]]] = []
        self.errors: dict[bytes, Any] = {}
        self.begun = asyncio.Semaphore(0)
        self.closed_links = 0
        self.confirms = True
        self.unknown_scripts: set[bytes] = set()
        self.silent_links = 0
        self.settles_at_s = 0.0
        self.ready = False
        self.open = asyncio.Event()
        self.open.set()
        self.sought = asyncio.Event()
        self.closing = asyncio.Event()
        self.slow_to_close = asyncio.Event()
        self.slow_to_close.set()
        self.reachable = asyncio.Event()
        self.reachable.set()

    async def open_link(self) -> Any:
        self.sought.set()
        await self.reachable.wait()
        silent = self.silent_links > 0
        self.silent_links -= silent
        return Link(self, silent=silent)

    def answer(self, keys: list[bytes], *, by_source: bool) -> Any:
        """What a script call with these keys is answered: an error of all of them, or a reply for each."""
        if not by_source and self.unknown_scripts.intersection(keys):
            return NoScriptError("No matching script")
        for key in keys:
            if isinstance(self.errors.get(key), Exception):
                return self.errors[key]
        return [self.errors.get(key, [b"OK", b"incarnation", 1, 1, key]) for key in keys]


class Link:
    dialect = Dialect()
    run_id = "server"

    def __init__(self, server: Server, *, silent: bool) -> None:
        self._server = server
        self._silent = silent

    @property
    def is_ready(self) -> bool:
        return self._server.ready

    @property
    def settles_at_s(self) -> float:
        return self._server.settles_at_s

    async def is_as_before(self) -> bool:
        return True

    def begin(self, commands: list[tuple[Any, ...]], *, confirm_s: float | None) -> Any:
        groups = [[bytes(key) for key in command[3 : 3 + command[2]]] for command in commands]
        self._server.batches.append([key for keys in groups for key in keys])
        self._server.scripts.append(
            [(command[0], keys) for command, keys in zip(commands, groups, strict=True)]
        )
        self._server.begun.release()
        return commands, groups, confirm_s

    async def finish(self, begun: Any) -> tuple[list[Any], bool]:
        commands, groups, confirm_s = begun
        if self._silent:
            await asyncio.Event().wait()
        await self._server.open.wait()
        answers = [
            self._server.answer(keys, by_source=command[0] == "EVAL")
            for command, keys in zip(commands, groups, strict=True)
        ]
        return answers, confirm_s is None or self._server.confirms

    async def pipeline(
        self, commands: list[tuple[Any, ...]], *, confirm_s: float | None
    ) -> tuple[list[Any], bool]:
        return await self.finish(self.begin(commands, confirm_s=confirm_s))

    async def close(self) -> None:
        self._server.closing.set()
        await self._server.slow_to_close.wait()
        self._server.closed_links += 1


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def lanes(server: Server) -> AsyncIterator[Lanes]:
    assert server.batches == []
    settings = SinkSettings.build("redis://server", "run", {"timeout_s": 4})
    made = Lanes(settings, server.open_link, count=LANES, name="lane")
    yield made
    await made.close()


def submit(lanes: Lanes, call: Call, *, by_source: bool = False) -> asyncio.Future[Reply]:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    return lanes.submit(call, by_source=by_source, asking=False, deadline=deadline).reply


def calls(count: int) -> list[Call]:
    return [peek(b"key %d" % number) for number in range(count)]


async def answers(futures: list[asyncio.Future[Reply]]) -> list[Any]:
    async with asyncio.timeout(PATIENCE_S):
        return [reply.rest[0] for reply in await asyncio.gather(*futures)]


@pytest.mark.parametrize("count", [1, LANES, MAX_BATCH_CALLS, MAX_BATCH_CALLS + 1, 500])
async def test_every_caller_gets_its_own_answer(lanes: Lanes, server: Server, count: int) -> None:
    for _ in range(3):
        assert await answers([submit(lanes, call) for call in calls(count)]) == [
            call.key for call in calls(count)
        ]
    assert max(map(len, server.batches)) <= MAX_BATCH_CALLS


async def test_what_waits_is_sent_in_few_pipelines(lanes: Lanes, server: Server) -> None:
    await answers([submit(lanes, call) for call in calls(4 * MAX_BATCH_CALLS)])
    sizes = [len(batch) for batch in server.batches]
    assert sizes[:3] == [MAX_BATCH_CALLS] * 3, "a share is never so small that the queue grows"
    assert len(sizes) <= 3 + MAX_BATCH_CALLS // MIN_SHARE_CALLS
    assert all(len(scripts) == 1 for scripts in server.scripts)


async def test_a_pipeline_ends_with_the_job_that_fills_it(lanes: Lanes, server: Server) -> None:
    large = Call(Step.PUT, b"large", (bytes(MAX_BATCH_BYTES),))
    await answers([submit(lanes, call) for call in (peek(b"before"), large, peek(b"after"))])
    assert server.batches == [[b"before", b"large"], [b"after"]]


async def test_a_caller_that_left_is_passed_over(lanes: Lanes, server: Server) -> None:
    left, stayed = [submit(lanes, call) for call in calls(2)]
    left.cancel()
    assert await answers([stayed]) == [b"key 1"]
    assert server.batches == [[b"key 1"]]


async def test_a_lane_that_is_busy_does_not_hold_what_comes_next(lanes: Lanes, server: Server) -> None:
    server.open.clear()
    futures = []
    for key in (b"first", b"second"):
        futures.append(submit(lanes, peek(key)))
        async with asyncio.timeout(PATIENCE_S):
            await server.begun.acquire()
    assert server.batches == [[b"first"], [b"second"]]
    server.open.set()
    assert await answers(futures) == [b"first", b"second"]


async def test_an_attempt_on_a_silent_connection_ends_in_time_for_another(
    lanes: Lanes, server: Server
) -> None:
    server.silent_links = 1
    with pytest.raises(NoReplyError):
        await submit(lanes, peek(b"first"))
    assert server.closed_links == 1
    assert await answers([submit(lanes, peek(b"again"))]) == [b"again"]


async def test_a_lane_cancelled_by_another_hand_takes_no_job_with_it(lanes: Lanes) -> None:
    await answers([submit(lanes, call) for call in calls(1)])
    await asyncio.sleep(0)
    lanes._tasks[0].cancel()  # its wait is over at once, the task itself ends in the next step of the loop
    assert await answers([submit(lanes, call) for call in calls(3)]) == [call.key for call in calls(3)]


# A step alone, over a connection that is good for sure: sent at once


async def one_for_each(lanes: Lanes, server: Server) -> list[asyncio.Future[Reply]]:
    """Keep every lane busy until the server is open."""
    server.open.clear()
    first = []
    for number in range(LANES):
        first.append(submit(lanes, peek(b"first %d" % number)))
        async with asyncio.timeout(PATIENCE_S):
            await server.begun.acquire()
    return first


async def connected(lanes: Lanes, server: Server) -> None:
    """Open all lanes, and let them wait for what comes next."""
    server.ready = True
    first = await one_for_each(lanes, server)
    server.open.set()
    await answers(first)
    await asyncio.sleep(0)
    server.batches.clear()
    server.begun = asyncio.Semaphore(0)


async def test_a_step_alone_is_sent_before_its_caller_waits(lanes: Lanes, server: Server) -> None:
    await connected(lanes, server)
    for key in (b"1", b"2", b"3"):
        submitted = submit(lanes, peek(key))
        assert server.batches[-1] == [key]
        assert not lanes.is_idle
        assert await answers([submitted]) == [key]
        await asyncio.sleep(0)
        assert lanes.is_idle


async def test_what_comes_after_a_step_that_was_sent_at_once_goes_together(
    lanes: Lanes, server: Server
) -> None:
    await connected(lanes, server)
    server.open.clear()
    futures = [submit(lanes, call) for call in calls(5)]
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            await server.begun.acquire()
    assert server.batches == [[b"key 0"], [b"key 1", b"key 2", b"key 3", b"key 4"]]
    server.open.set()
    assert await answers(futures) == [call.key for call in calls(5)]


@pytest.mark.parametrize("why", ["not ready", "renewed", "must settle"])
async def test_a_step_is_not_sent_at_once_where_its_connection_has_to_be_looked_at_first(
    lanes: Lanes, server: Server, why: str
) -> None:
    await connected(lanes, server)
    server.ready = why != "not ready"
    if why == "renewed":
        lanes.renew()
    call = Call(Step.FREEZE if why == "must settle" else Step.PEEK, b"rollout", ())
    submitted = submit(lanes, call)
    assert server.batches == []
    assert await answers([submitted]) == [b"rollout"]
    assert server.closed_links == (why == "renewed")


async def test_a_step_that_was_sent_at_once_and_fails_costs_its_connection_only(
    lanes: Lanes, server: Server
) -> None:
    await connected(lanes, server)
    server.errors[b"bad"] = b"no reply of a step"
    with pytest.raises(InvalidResponse):
        await submit(lanes, peek(b"bad"))
    assert server.closed_links == 1
    assert await answers([submit(lanes, call) for call in calls(3)]) == [call.key for call in calls(3)]


async def test_a_silent_connection_ends_a_step_that_was_sent_at_once(lanes: Lanes, server: Server) -> None:
    await connected(lanes, server)
    server.open.clear()
    with pytest.raises(NoReplyError):
        await submit(lanes, peek(b"first"))
    assert server.closed_links == 1
    server.open.set()
    assert await answers([submit(lanes, peek(b"again"))]) == [b"again"]


async def test_a_caller_that_leaves_a_step_that_was_sent_at_once_leaves_its_reply_to_nobody(
    lanes: Lanes, server: Server
) -> None:
    await connected(lanes, server)
    server.open.clear()
    submit(lanes, peek(b"left")).cancel()
    others = [submit(lanes, call) for call in calls(3)]
    server.open.set()
    assert await answers(others) == [call.key for call in calls(3)]
    assert server.batches[0] == [b"left"]
    assert server.closed_links == 0


@pytest.mark.parametrize("ready", [True, False], ids=["sent at once", "sent by its lane"])
async def test_a_lane_that_waits_keeps_nothing_of_its_last_step(
    lanes: Lanes, server: Server, *, ready: bool
) -> None:
    await connected(lanes, server)
    server.ready = ready
    payload = bytes(1000)
    held = sys.getrefcount(payload)
    await answers([submit(lanes, Call(Step.PUT, b"key", (payload,)))])
    await asyncio.sleep(0)
    gc.collect()
    assert sys.getrefcount(payload) == held


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_closing_tells_a_step_that_was_sent_at_once(lanes: Lanes, server: Server, turns: int) -> None:
    await connected(lanes, server)
    server.open.clear()
    submitted = submit(lanes, peek(b"sent"))
    for _ in range(turns):
        await asyncio.sleep(0)
    await lanes.close()
    with pytest.raises(BackendUnavailableError, match="closed before an answer"):
        await submitted
    assert server.closed_links == LANES


async def test_a_lane_cancelled_before_it_took_up_what_was_sent_leaves_the_others_as_they_were(
    lanes: Lanes, server: Server
) -> None:
    await connected(lanes, server)
    server.open.clear()
    submitted = submit(lanes, peek(b"sent"))
    lane = next(task for task in lanes._tasks if task._fut_waiter is None or task._fut_waiter.done())  # type: ignore[attr-defined]
    lane.cancel()
    with pytest.raises(BackendUnavailableError, match="closed before an answer"):
        await submitted
    server.open.set()
    assert await answers([submit(lanes, call) for call in calls(3)]) == [call.key for call in calls(3)]
    await asyncio.sleep(0)
    assert lanes.is_idle


# Groups: what one script call holds


def job(call: Call, *, by_source: bool = False, asking: bool = False) -> Job:
    return Job(call, by_source, asking, deadline=0.0, reply=asyncio.get_running_loop().create_future())


def put_of(nbytes: int, key: bytes = b"put") -> Call:
    return Call(Step.PUT, key, (bytes(nbytes),))


async def test_calls_of_one_step_join_in_the_order_they_came() -> None:
    jobs = [
        job(call) for call in (peek(b"1"), put_of(5), peek(b"2"), delete(b"3", incarnation=""), peek(b"1"))
    ]
    peeks, puts, deletes = grouped(jobs, one_key=False)
    assert (peeks, puts, deletes) == ([jobs[0], jobs[2], jobs[4]], [jobs[1]], [jobs[3]])


@pytest.mark.parametrize("step", Step)
async def test_every_step_joins_others_of_its_kind_unless_it_may_take_long(step: Step) -> None:
    jobs = [job(Call(step, b"%d" % number, ())) for number in range(3)]
    alone = step in (*(Step.FREEZE, Step.READ, Step.INDEX, Step.BLOCKS, Step.ROWS, Step.FIELDS, Step.FETCH),)
    assert grouped(jobs, one_key=False) == ([[each] for each in jobs] if alone else [jobs])


async def test_a_large_call_is_alone_and_those_around_it_join() -> None:
    sizes = (1, MAX_JOINED_BYTES + 1, MAX_JOINED_BYTES, 2 * MAX_JOINED_BYTES, 2)
    jobs = [job(put_of(size)) for size in sizes]
    assert grouped(jobs, one_key=False) == [[jobs[0], jobs[2], jobs[4]], [jobs[1]], [jobs[3]]]


async def test_calls_sent_by_source_join_each_other_only() -> None:
    jobs = [job(peek(b"%d" % number), by_source=number % 2 == 1) for number in range(5)]
    assert grouped(jobs, one_key=False) == [[jobs[0], jobs[2], jobs[4]], [jobs[1], jobs[3]]]


async def test_in_a_cluster_a_script_call_holds_one_rollout() -> None:
    jobs = [job(peek(key)) for key in (b"1", b"2", b"1")]
    assert grouped(jobs, one_key=True) == [[jobs[0], jobs[2]], [jobs[1]]]


async def test_what_asks_a_node_that_is_getting_the_slot_joins_nothing_else() -> None:
    jobs = [job(peek(b"1"), asking=asking) for asking in (False, True, False)]
    assert grouped(jobs, one_key=True) == [[jobs[0], jobs[2]], [jobs[1]]]


async def test_no_job_is_in_two_groups_or_in_none() -> None:
    steps = random.Random(3).choices([Step.PUT, Step.BEGIN, Step.FREEZE, Step.READ, Step.MARK], k=64)
    jobs = [job(Call(step, b"%d" % number, ())) for number, step in enumerate(steps)]
    groups = grouped(jobs, one_key=False)
    assert sorted(jobs.index(each) for group in groups for each in group) == list(range(64))
    assert all(group == sorted(group, key=jobs.index) for group in groups)
    assert len(groups) == 3 + steps.count(Step.FREEZE) + steps.count(Step.READ)


async def test_nothing_makes_no_group() -> None:
    assert grouped([], one_key=False) == []


async def test_a_batch_is_sent_as_one_script_call_for_each_group(lanes: Lanes, server: Server) -> None:
    large = put_of(MAX_JOINED_BYTES + 1, b"large")
    submitted = [put_of(1, b"1"), large, peek(b"2"), put_of(1, b"3"), peek(b"4")]
    assert await answers([submit(lanes, call) for call in submitted]) == [call.key for call in submitted]
    assert server.scripts == [
        [("EVALSHA", [b"1", b"3"]), ("EVALSHA", [b"large"]), ("EVALSHA", [b"2", b"4"])],
    ]


async def test_callers_whose_script_is_sent_by_source_get_their_own_answers(
    lanes: Lanes, server: Server
) -> None:
    futures = [submit(lanes, call, by_source=number > 1) for number, call in enumerate(calls(4))]
    assert await answers(futures) == [b"key 0", b"key 1", b"key 2", b"key 3"]
    assert server.scripts == [[("EVALSHA", [b"key 0", b"key 1"]), ("EVAL", [b"key 2", b"key 3"])]]


async def test_an_error_of_one_entry_is_told_to_its_own_caller_only(lanes: Lanes, server: Server) -> None:
    server.errors[b"key 1"] = [b"ERROR", b"CORRUPT the state of the rollout is unreadable"]
    futures = [submit(lanes, call) for call in calls(3)]
    outcomes = await asyncio.gather(*futures, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes[1:2]] == ["CORRUPT the state of the rollout is unreadable"]
    assert isinstance(outcomes[1], ResponseError)
    assert await answers([futures[0], futures[2]]) == [b"key 0", b"key 2"]
    assert server.closed_links == 0


async def test_an_error_of_a_script_call_is_told_to_all_in_it_and_to_no_other(
    lanes: Lanes, server: Server
) -> None:
    server.errors[b"key 1"] = NoScriptError("no matching script")
    outcomes = await asyncio.gather(
        *(submit(lanes, call) for call in (*calls(3), put_of(1, b"put"))), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [NoScriptError] * 3 + [Reply]
    assert server.closed_links == 0


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 5, b"OK", [], [b"OK"], [b"ERROR"], [b"ERROR", 5], [b"ERROR", None]),
        *([b"ERROR", b"CORRUPT", b"more"], [b"OK", b"a", b"x", 1], [5, b"a", 1, 1], [b"OK", None, 1, 1]),
    ],
    ids=repr,
)
async def test_a_reply_of_unknown_form_costs_the_connection_and_may_be_asked_for_again(
    lanes: Lanes, server: Server, wrong: Any
) -> None:
    server.errors[b"key 1"] = wrong
    outcomes = await asyncio.gather(*(submit(lanes, call) for call in calls(3)), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {InvalidResponse}
    assert server.closed_links == 1
    server.errors.clear()
    assert await answers([submit(lanes, call) for call in calls(3)]) == [b"key 0", b"key 1", b"key 2"]


# One of Redis' own commands


@pytest.mark.parametrize(
    "answer",
    [b"a part", memoryview(b"a part"), None, ResponseError("WRONGTYPE Operation against a key")],
    ids=lambda answer: type(answer).__name__,
)
def test_a_part_comes_as_the_value_of_its_command(answer: Any) -> None:
    call = fetch(b"key", b"n" * 16)
    words = command([call], Dialect(), by_source=False)
    assert words == ("HGET", b"key", b"b:" + b"n" * 16)
    (read,) = answers_of([[object()]], [[words]], [answer], "run")  # type: ignore[list-item]
    if isinstance(answer, Exception):
        assert read is answer
    else:
        assert read == [Reply("OK", "", 0, 0, (answer,), "run")]


@pytest.mark.parametrize("answer", [5, "text", [], [b"a part"], [None], [[b"a part"]]], ids=repr)
def test_what_is_no_value_of_a_part_costs_the_connection(answer: Any) -> None:
    words = command([fetch(b"key", b"n" * 16)], Dialect(), by_source=False)
    with pytest.raises(InvalidResponse):
        answers_of([[object()]], [[words]], [answer], "run")  # type: ignore[list-item]


# A large part, in a transaction


def staging(part: bytes = b"x" * (MAX_JOINED_BYTES + 1)) -> list[tuple[Any, ...]]:
    return commands([stage(b"key", b"n" * 16, part, incarnation="attempt")], Dialect(), by_source=False)


def read_staging(*answers: Any) -> Any:
    (read,) = answers_of([[object()]], [staging()], answers, "run")  # type: ignore[list-item]
    return read


def test_a_part_up_to_the_bound_goes_in_its_script() -> None:
    ((word, *_),) = staging(b"x" * (MAX_JOINED_BYTES - 16))
    assert word == "EVALSHA"
    assert [words[0] for words in staging()] == ["MULTI", "EVAL", "HSETNX", "EVAL", "EXEC"]


def test_the_reply_of_a_transaction_is_that_of_its_step() -> None:
    step = [[b"OK", b"attempt", 1, 0]]
    queued = [b"OK", b"QUEUED", b"QUEUED", b"QUEUED"]
    assert read_staging(*queued, [step, 1, None]) == [Reply("OK", "attempt", 1, 0, (), "run")]


def test_the_first_error_of_a_transaction_tells_why() -> None:
    moved, aborted = ResponseError("MOVED 1 127.0.0.1:7000"), ResponseError("EXECABORT")
    assert read_staging(b"OK", moved, moved, moved, aborted) is moved
    refused = ResponseError("OOM command not allowed")
    queued = [b"OK", b"QUEUED", b"QUEUED", b"QUEUED"]
    assert read_staging(*queued, [refused, 1, None]) is refused


@pytest.mark.parametrize("last", [None, [], b"QUEUED", [None, 1, None], [[b"OK"], 1, None]], ids=repr)
def test_what_is_no_reply_of_a_transaction_costs_the_connection(last: Any) -> None:
    with pytest.raises(InvalidResponse):
        read_staging(b"OK", b"QUEUED", b"QUEUED", b"QUEUED", last)


# Shares: a free lane leaves something for the others


@pytest.mark.parametrize(
    ("waiting", "first"),
    [
        *((1, 1), (MIN_SHARE_CALLS, MIN_SHARE_CALLS), (MIN_SHARE_CALLS + 1, MIN_SHARE_CALLS)),
        *((2 * MIN_SHARE_CALLS, MIN_SHARE_CALLS), (40, 20), (41, 21), (500, MAX_BATCH_CALLS)),
    ],
)
async def test_a_lane_takes_its_share_and_leaves_the_rest_to_the_other(
    lanes: Lanes, server: Server, waiting: int, first: int
) -> None:
    server.open.clear()
    futures = [submit(lanes, call) for call in calls(waiting)]
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(min(LANES, 1 + (waiting > first))):
            await server.begun.acquire()
    sent = [len(batch) for batch in server.batches]
    assert sent == [first, min(waiting - first, MAX_BATCH_CALLS)][: len(sent)]
    server.open.set()
    assert await answers(futures) == [call.key for call in calls(waiting)]


async def test_the_last_free_lane_takes_all_that_waits(lanes: Lanes, server: Server) -> None:
    server.open.clear()
    busy = submit(lanes, peek(b"busy"))
    async with asyncio.timeout(PATIENCE_S):
        await server.begun.acquire()
        futures = [submit(lanes, call) for call in calls(40)]
        await server.begun.acquire()
    assert [len(batch) for batch in server.batches] == [1, 40]
    server.open.set()
    assert await answers([busy, *futures]) == [b"busy", *(call.key for call in calls(40))]


# Closing


async def test_closing_answers_what_waits_and_refuses_what_comes_later(lanes: Lanes, server: Server) -> None:
    server.open.clear()
    waiting = [submit(lanes, call) for call in calls(3 * MAX_BATCH_CALLS)]
    await asyncio.sleep(0)
    await lanes.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {BackendUnavailableError}
    with pytest.raises(BackendUnavailableError, match="closed"):
        submit(lanes, peek(b"later"))
    await lanes.close()


async def test_closing_ends_a_lane_whose_cancellation_is_swallowed(server: Server) -> None:
    connecting = asyncio.Event()

    async def open_link() -> Any:
        connecting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await server.open_link()

    lanes = Lanes(SinkSettings.build("redis://server", "run", {}), open_link, count=1, name="lane")
    reply = submit(lanes, peek(b"key"))
    await connecting.wait()
    async with asyncio.timeout(PATIENCE_S):
        await lanes.close()
    assert (await answers([reply]))[0] == b"key"
    assert server.closed_links == 1


async def test_a_step_whose_caller_left_keeps_no_bytes_until_a_lane_comes_across_it(
    lanes: Lanes, server: Server
) -> None:
    first = await one_for_each(lanes, server)
    left = submit(lanes, Call(Step.PUT, b"large", (bytes(1000),)))
    left.cancel()
    await asyncio.sleep(0)
    assert [job.call.nbytes for job in lanes._jobs] == [0]
    server.open.set()
    await answers(first)


async def test_a_caller_that_leaves_while_the_connection_is_made_sends_nothing(
    lanes: Lanes, server: Server
) -> None:
    server.reachable.clear()
    left, stayed = [submit(lanes, call) for call in calls(2)]
    async with asyncio.timeout(PATIENCE_S):
        await server.sought.wait()
    left.cancel()
    await asyncio.sleep(0)
    server.reachable.set()
    assert await answers([stayed]) == [b"key 1"]
    assert server.batches == [[b"key 1"]]


@pytest.mark.parametrize("step", [Step.FREEZE, Step.READ, Step.DROP])
async def test_trainers_do_not_go_on_with_a_server_that_may_be_short_of_steps(
    lanes: Lanes, server: Server, step: Step
) -> None:
    server.settles_at_s = time.monotonic() + 60.0
    call = Call(step, b"rollout", ())
    waiting, peeking = submit(lanes, call), submit(lanes, peek(b"other"))
    with pytest.raises(NotSettledError) as caught:
        await waiting
    assert 50.0 < caught.value.left_s <= 60.0
    assert await answers([peeking]) == [b"other"]
    server.settles_at_s = 0.0
    assert await answers([submit(lanes, call)]) == [b"rollout"]


async def test_what_was_not_confirmed_is_told_to_everybody_though_the_first_caller_left(
    lanes: Lanes, server: Server
) -> None:
    server.confirms = False
    server.open.clear()
    leaves, stays = [submit(lanes, put_of(1, key)) for key in (b"leaves", b"stays")]
    async with asyncio.timeout(PATIENCE_S):
        await server.begun.acquire()
    leaves.cancel()
    await asyncio.sleep(0)
    server.open.set()
    with pytest.raises(NotConfirmedError):
        await answers([stays])
    assert server.batches == [[b"leaves", b"stays"]]


async def test_an_error_of_one_entry_is_told_though_nothing_was_confirmed(
    lanes: Lanes, server: Server
) -> None:
    server.confirms = False
    server.errors[b"damaged"] = [b"ERROR", b"CORRUPT the rollout has no state"]
    damaged, written = [submit(lanes, put_of(1, key)) for key in (b"damaged", b"written")]
    with pytest.raises(ResponseError, match="no state"):
        await answers([damaged])
    with pytest.raises(NotConfirmedError):
        await answers([written])
    assert server.batches == [[b"damaged", b"written"]]


async def test_outside_the_lanes_a_script_that_is_unknown_is_sent_whole_for_the_same_steps(
    server: Server,
) -> None:
    steps = [put_of(2, b"put"), peek(b"peek"), put_of(3, b"other put")]
    server.unknown_scripts = {b"put", b"other put"}
    link: Any = Link(server, silent=False)
    replies = await exchange(link, steps, one_key=False)
    assert [reply.rest for reply in replies if isinstance(reply, Reply)] == [
        (b"put",),
        (b"peek",),
        (b"other put",),
    ]
    assert server.scripts == [
        [("EVALSHA", [b"put", b"other put"]), ("EVALSHA", [b"peek"])],
        [("EVAL", [b"put", b"other put"])],
    ]


# Connections that are not to be used any more


async def test_after_a_renewal_each_lane_connects_anew(lanes: Lanes, server: Server) -> None:
    await answers([submit(lanes, call) for call in calls(1)])
    lanes.renew()
    await answers([submit(lanes, call) for call in calls(1)])
    assert server.closed_links == 1
    await answers([submit(lanes, call) for call in calls(1)])
    assert server.closed_links == 1


async def test_closing_while_an_old_connection_is_let_go_answers_everybody(
    lanes: Lanes, server: Server
) -> None:
    await answers([submit(lanes, call) for call in calls(1)])
    lanes.renew()
    server.slow_to_close.clear()
    waiting = submit(lanes, peek(b"key"))
    async with asyncio.timeout(PATIENCE_S):
        await server.closing.wait()
    closing = asyncio.create_task(lanes.close())
    server.slow_to_close.set()
    await closing
    with pytest.raises(BackendUnavailableError):
        await waiting
