"""Runs steps: one loop of retries with a deadline, for each event loop and process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from redis.exceptions import AskError, ClusterDownError
from redis.exceptions import ConnectionError as RedisConnectionError

from gym_capture_redis.connection import Link
from gym_capture_redis.errors import BackendUnavailableError, CaptureError
from gym_capture_redis.failures import Failures
from gym_capture_redis.faults import is_transient, is_unknown_script
from gym_capture_redis.healing import Healer, Owns
from gym_capture_redis.inflight import ByteBudget, Hold
from gym_capture_redis.lanes import Job, closed_error, exchange
from gym_capture_redis.node import Node
from gym_capture_redis.recent import NewestStep
from gym_capture_redis.retry import Backoff
from gym_capture_redis.scripts import Call, Reply, again, peek
from gym_capture_redis.settings import ConnectionSettings
from gym_capture_redis.subject import Subject
from gym_capture_redis.topology import new_topology

_THREADS = 2
_MOST_WORKING = 2
"""Who may work on the event loop in one round of it."""
_WATCH_S = 1.0
_SHORTEST_WATCH_S = 0.1

_INHERITED: list[dict[asyncio.AbstractEventLoop, Executor]] = []

T = TypeVar("T")


class Executor:
    """Runs steps and other work within deadlines. Belongs to one event loop; opens nothing until used."""

    def __init__(self, settings: ConnectionSettings, healer: Healer | None = None) -> None:
        self._timeout_s = settings.timeout_s
        self._failures = Failures(settings)
        self._server = str(settings.url)
        self._one_key = settings.url.topology == "cluster"
        self._healer = healer
        self._healing = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._watch_s = watch_s(settings.settle_s)
        self._topology = new_topology(settings, self._heal)
        self._budget = ByteBudget(settings.max_inflight_bytes)
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._working = 0

    def deadline(self) -> float:
        """Loop time at which a call that begins now has to end."""
        return asyncio.get_running_loop().time() + self._timeout_s

    async def run(
        self,
        call: Call,
        subject: Subject,
        *,
        deadline: float,
        urgent: bool = False,
        sent: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> Reply:
        """Run one step, sending it again until it is answered or ``deadline`` has passed.

        ``sent``: another step that may have changed something has been sent for the same caller before.
        ``meanwhile``: what can be done while the server works; left out where the step could not be sent at
        once.

        Raises:
            BackendUnavailableError: no answer in time; says whether the step may have been applied.
            DurabilityError: applied, but not confirmed in time as durable as promised.
            CaptureError: what the server's refusal means (see ``faults.final_error``).

        """
        by_source, redirected, backoff = False, None, Backoff()
        jobs: list[Job] = []
        while True:
            node, asked_at_s = None, time.monotonic()
            try:
                node = self._node_of(call.key, redirected) or await self._find(call.key, deadline)
                job = node.submit(
                    call, urgent=urgent, by_source=by_source, asking=node is redirected, deadline=deadline
                )
                jobs.append(job)
                if job.sent and meanwhile is not None:
                    meanwhile()
                # Half the work of asyncio.timeout_at.
                timer = asyncio.get_running_loop().call_at(deadline, _expire, job.reply)
                try:
                    answer = await job.reply
                finally:
                    timer.cancel()
            except TimeoutError as error:
                sent = sent or any(job.sent for job in jobs)
                raise self._failures.no_answer(subject, backoff.last, error, sent=sent) from None
            except Exception as error:  # noqa: BLE001 - sorted out here, each kind by name
                if is_unknown_script(error) and not by_source:
                    by_source = True
                    jobs.pop()  # it was not run
                    continue
                if not is_transient(error):
                    before = sent or any(job.sent for job in jobs[:-1])
                    raise self._failures.final(error, subject, sent_before=before) from None
                redirected = self._topology.learn(error, node) if node is not None else None
                pause_s, call = backoff.after(error), again(call)
            else:
                if self._healer is not None:
                    self._note(self._healer, call, subject, answer, asked_at_s)
                return answer
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:  # a step that fails at once never meets its deadline otherwise
                sent = sent or any(job.sent for job in jobs)
                raise self._failures.no_answer(subject, backoff.last, sent=sent)
            await asyncio.sleep(min(pause_s, left_s))

    def _note(self, healer: Healer, call: Call, subject: Subject, reply: Reply, asked_at_s: float) -> None:
        """Keep what the server might forget, and watch it for as long as that may be."""
        kept = healer.recent.note(call, subject, reply, asked_at_s=asked_at_s)
        if kept and self._watcher is None and not self._closed:
            self._watcher = asyncio.get_running_loop().create_task(
                self._watch(healer), name="gym-capture-redis watcher"
            )

    async def _watch(self, healer: Healer) -> None:
        """Notice another server though nothing is to be sent: connecting to it puts back what it forgot.

        What could not be put back then, or was acknowledged by the earlier server just before, follows here.
        """
        meetings: dict[str, asyncio.Task[None]] = {}
        try:
            while (newest := healer.recent.newest()) or meetings:
                await asyncio.sleep(self._watch_s)
                meetings = {run_id: meeting for run_id, meeting in meetings.items() if not meeting.done()}
                for run_id, step in newest:
                    # Each by itself: one that stays away must not hold up what another one forgot.
                    if run_id not in meetings:
                        meetings[run_id] = asyncio.create_task(self._meet(healer, run_id, step))
        finally:
            self._watcher = None
            for meeting in meetings.values():
                meeting.cancel()
            await asyncio.gather(*meetings.values(), return_exceptions=True)

    async def _meet(self, healer: Healer, run_id: str, step: NewestStep) -> None:
        """Ask who holds a step of this server now; if it is another one, put back there what may be lost."""
        with contextlib.suppress(CaptureError):  # whoever sends a step is told
            reply = await self.run(peek(step.key), step.subject, deadline=self.deadline())
            if reply.run_id != run_id:
                await healer.heal(self._run_all, reply.run_id, owns=lambda _: True, lost_by=[run_id])

    async def _run_all(self, calls: Sequence[tuple[Call, Subject]]) -> Sequence[Reply | Exception]:
        deadline = self.deadline()
        answers = await asyncio.gather(
            *(self.run(call, subject, deadline=deadline) for call, subject in calls), return_exceptions=True
        )
        return [_not_cancelled(answer) for answer in answers]

    async def _heal(self, link: Link, owns: Owns) -> None:
        """Put back over a new connection what its server may have forgotten, before anything else is sent."""
        healer = self._healer
        if healer is None:
            return

        async def send(calls: Sequence[tuple[Call, Subject]]) -> Sequence[Reply | Exception]:
            return await exchange(link, [call for call, _ in calls], one_key=self._one_key)

        async with self._healing:
            try:
                await healer.heal(send, link.run_id, owns=owns)
            except AskError as error:  # of another rollout: it redirects nobody who waits here
                raise RedisConnectionError("what it forgot is on the move") from error

    def _node_of(self, key: bytes, redirected: Node | None = None) -> Node | None:
        """The node that a step was redirected to, else the one that holds the key. None: not known."""
        if self._closed:  # nobody would close what is opened from now on
            raise closed_error()
        if redirected is not None and not redirected.is_closed:  # else forgotten meanwhile, for a newer map
            return redirected
        return self._topology.node_of(key)

    async def _find(self, key: bytes, deadline: float) -> Node:
        """The node that holds the key, once that is known again."""
        async with asyncio.timeout_at(deadline):
            await self._topology.refresh()
        node = self._node_of(key)
        if node is None:
            raise ClusterDownError("no node serves the slot")
        return node

    def room_now(self, nbytes: int) -> Hold | None:
        """Hold ``nbytes`` of ``max_inflight_bytes``, if there is room and nobody waits for it."""
        return self._budget.try_hold(nbytes)

    async def room(self, nbytes: int, subject: Subject, *, deadline: float) -> Hold:
        """Hold ``nbytes`` of ``max_inflight_bytes``, waiting for them if need be.

        Raises:
            BackendUnavailableError: there was no room in time; nothing was sent.

        """
        try:
            async with asyncio.timeout_at(deadline):
                return await self._budget.hold(nbytes)
        except TimeoutError:
            raise BackendUnavailableError(
                f"no room among max_inflight_bytes within {self._timeout_s:g} s: {self._server} takes "
                f"records more slowly than they come, or not at all; nothing was sent ({subject})",
                rollout_id=subject.rollout_id,
                model_call_id=subject.model_call_id,
            ) from None

    async def offload(self, work: Callable[[], T], subject: Subject, *, deadline: float, sent: bool) -> T:
        """Do long work on a thread of this executor's own: the default ones may be taken by the user.

        ``sent``: the step that it is done for has been sent by now.

        Raises:
            BackendUnavailableError: it did not end in time, or the client was closed.

        """
        if self._closed:
            raise closed_error()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="gym-capture-redis")
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise self._failures.too_late(
                "encoding or decoding did not end", subject, None, sent=sent
            ) from error

    async def turn(self) -> None:
        """Wait until there is time for some milliseconds of work on the event loop.

        What came over many connections at once must not hold it for all of them: others get on in between.
        """
        while self._working >= _MOST_WORKING:  # noqa: ASYNC110 - the next round comes by itself
            await asyncio.sleep(0)
        if not self._working:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._working += 1

    def _next_round(self) -> None:
        self._working = 0

    async def close(self) -> None:
        """End the lanes and their connections. What still waits is answered with an error."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._topology.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None


def watch_s(settle_s: float) -> float:
    """How often an idle writer asks whether a server is still the one that acknowledged its newest steps.

    What that one's successor lacks must be back before it is ``settle_s`` old, when rollouts are frozen.
    """
    return min(_WATCH_S, max(_SHORTEST_WATCH_S, settle_s / 2))


def _not_cancelled(answer: Reply | BaseException) -> Reply | Exception:
    """An answer of ``asyncio.gather``: what is no error of the step is raised."""
    if isinstance(answer, Reply | Exception):
        return answer
    raise answer


def _expire(reply: asyncio.Future[Reply]) -> None:
    if not reply.done():
        reply.set_exception(TimeoutError())


class PerLoop:
    """One executor for each event loop, none of them inherited over a fork."""

    def __init__(self, make: Callable[[], Executor]) -> None:
        self._make = make
        self._pid = os.getpid()
        self._executors: dict[asyncio.AbstractEventLoop, Executor] = {}

    def get(self) -> Executor:
        """The executor of the running loop, made at first use."""
        if self._pid != os.getpid():
            # The parent's sockets are not ours to use or to close, not even by garbage collection.
            _INHERITED.append(self._executors)
            self._pid, self._executors = os.getpid(), {}
        loop = asyncio.get_running_loop()
        executor = self._executors.get(loop)
        if executor is None:
            # One at a time: another thread may add its own loop to the same dict meanwhile.
            for other in [kept for kept in list(self._executors) if kept.is_closed()]:
                self._executors.pop(other, None)
            executor = self._executors[loop] = self._make()
        return executor

    async def close(self) -> None:
        """Close the running loop's executor; those of other loops end with their loops."""
        executor = self._executors.pop(asyncio.get_running_loop(), None) if self._pid == os.getpid() else None
        if executor is not None:
            await executor.close()
