"""Runs steps for threads: as ``executor.Executor`` does, on connections that block.

For what NeMo Gym calls on threads of its own. Opens nothing until used; may be shared by any number of
threads, and used on both sides of a fork.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

from redis import exceptions as redis_errors

from gym_capture_redis.batches import answers_of, commands_of, grouped
from gym_capture_redis.connection import EmbeddedLease
from gym_capture_redis.failures import Failures
from gym_capture_redis.faults import NotConfirmedError, is_transient, is_unknown_script
from gym_capture_redis.retry import Backoff, attempt_s
from gym_capture_redis.scripts import Call, Reply, again
from gym_capture_redis.sentinels import Sentinels
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ServerSettings
from gym_capture_redis.slots import SlotMap
from gym_capture_redis.subject import Subject
from gym_capture_redis.sync_link import SyncLink, follow, within
from gym_capture_redis.turns import Job, Sent, Turns, in_order


class SyncClient:
    """Runs steps within deadlines, in the thread that calls, over a connection of its own for as long."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._failures = Failures(settings)
        # By process: what was opened before a fork is the parent's, not even to be closed here.
        self._servers: dict[int, _Servers] = {}

    def deadline(self) -> float:
        """``time.monotonic`` at which a call that begins now has to end."""
        return time.monotonic() + self._settings.timeout_s

    def run(self, call: Call, subject: Subject, *, deadline: float) -> Reply:
        """Run one step, sending it again until it is answered or ``deadline`` has passed.

        Raises:
            BackendUnavailableError: no answer in time; says whether the step may have been applied.
            DurabilityError: applied, but not confirmed in time as durable as promised.
            CaptureError: what the server's refusal means (see ``faults.final_error``).

        """
        (reply,) = self._answered([call], subject, deadline, _Node.run_alone)
        return reply

    def run_joined(self, calls: Sequence[Call], subject: Subject, *, deadline: float) -> list[Reply]:
        """Run steps on one rollout, in this order but parts first, in a round trip that other threads share.

        All of them are sent again until all are answered; raises what ``run`` does.
        """
        return self._answered(calls, subject, deadline, _Node.run_joined)

    def _answered(self, calls: Sequence[Call], subject: Subject, deadline: float, run: _Run) -> list[Reply]:
        by_source, redirected, backoff = False, None, Backoff()
        jobs: list[Job] = []
        while True:
            servers, node = self._of_this_process(), None  # others once the client was closed
            try:
                node = redirected or servers.node_of(calls[0].key, deadline)
                job = Job(calls, by_source=by_source, asking=redirected is not None, deadline=deadline)
                jobs.append(job)
                return _replies(run(node, job))
            except Exception as error:  # noqa: BLE001 - sorted out here, each kind by name
                if is_unknown_script(error) and not by_source:
                    by_source = True
                    continue
                if not is_transient(error):
                    before = any(job.sent for job in jobs[:-1])
                    raise self._failures.final(error, subject, sent_before=before) from None
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    # That the deadline cut an attempt short says less than what the one before it met.
                    cut_short = isinstance(error, redis_errors.TimeoutError)
                    last = backoff.last if cut_short and backoff.last else error
                    sent = any(job.sent for job in jobs)
                    raise self._failures.no_answer(subject, last, sent=sent) from last
                redirected = servers.learn(error, node) if node is not None else None
                pause_s, calls = backoff.after(error), [again(call) for call in calls]
            time.sleep(min(pause_s, left_s))

    def close(self) -> None:
        """Close what no thread uses, and the rest once it is free. A later call opens anew. Idempotent."""
        servers = self._servers.pop(os.getpid(), None)
        if servers is not None:
            servers.close()

    async def close_in_loop(self) -> None:
        """Close without holding the event loop; only letting an embedded server go takes time."""
        if self._settings.url.scheme == "embedded":
            await asyncio.to_thread(self.close)
        else:
            self.close()

    def _of_this_process(self) -> _Servers:
        pid = os.getpid()
        return self._servers.get(pid) or self._servers.setdefault(pid, _new_servers(self._settings))


class _Servers(Protocol):
    """Which server holds a rollout, and the connections to all of them."""

    def node_of(self, key: bytes, deadline: float) -> _Node:
        """The one to send steps on this key to.

        Raises:
            redis.exceptions.RedisError, OSError: nobody could tell.

        """

    def learn(self, error: BaseException, node: _Node) -> _Node | None:
        """Learn from what a step on ``node`` met. Returns the node that it must ask instead, this once."""

    def close(self) -> None:
        """Close all connections."""


class _Node:
    """A server, and the connections to it that are free."""

    def __init__(
        self, settings: ServerSettings, find: Callable[[float], Address | str], *, one_key: bool = False
    ) -> None:
        self._settings = settings
        self._find = find
        self._one_key = one_key
        self._turns = Turns(settings.connections, self._send)
        self._lock = threading.Lock()
        self._free: list[SyncLink] = []
        self._closed = False

    def run_alone(self, job: Job) -> list[Reply | Exception]:
        """Run steps once, over a connection that nobody else uses meanwhile."""
        self._send([job])
        return job.answers()

    def run_joined(self, job: Job) -> list[Reply | Exception]:
        """Run steps once, with those of other threads that wait."""
        return self._turns.run(job)

    def _send(self, jobs: Sequence[Job]) -> None:
        try:
            self._exchange(jobs)
        except Exception as error:  # noqa: BLE001 - it belongs to each of the callers
            for job in jobs:
                job.fail(error)

    def _exchange(self, jobs: Sequence[Job]) -> None:
        """Send the steps of all jobs as one pipeline, within the deadline of the first."""
        left_s = jobs[0].deadline - time.monotonic()
        nbytes = sum(step.call.nbytes for job in jobs for step in job.steps)
        try_s = attempt_s(left_s, timeout_s=self._settings.timeout_s, nbytes=nbytes)
        try_until = time.monotonic() + try_s
        link = self._take() or within(try_until, partial(self._open, try_until), undo=SyncLink.close)
        try:
            waiting = [job for job in jobs if job.may_be_sent()]
            groups = grouped(in_order(waiting), one_key=self._one_key)
            sent = [commands_of(group, link.dialect) for group in groups]
            writes = any(group[0].call.step.writes for group in groups)
            answers, confirmed = link.pipeline(
                list(chain.from_iterable(sent)), deadline=try_until, confirm_s=try_s / 2 if writes else None
            )
            read = answers_of(groups, sent, answers, link.run_id)
            for group, answer in zip(groups, read, strict=True):
                _answer(group, answer, confirmed=confirmed)
        except BaseException:
            # Replies may still be under way on it, and those that lead to the same server fare no better.
            link.close()
            self.forget_links()
            raise
        self._give_back(link)

    def forget_links(self) -> None:
        """Close the free connections."""
        with self._lock:
            free, self._free = self._free, []
        for link in free:
            link.close()

    def close(self) -> None:
        """Close the free connections, and each of the others when it is given back."""
        self._closed = True
        self.forget_links()

    def _open(self, deadline: float) -> SyncLink:
        if self._closed:
            raise redis_errors.ConnectionError("the client was closed meanwhile")
        link = SyncLink(self._settings, self._find(deadline))
        link.connect(deadline)
        return link

    def _take(self) -> SyncLink | None:
        with self._lock:
            return self._free.pop() if self._free else None

    def _give_back(self, link: SyncLink) -> None:
        with self._lock:
            if not self._closed and len(self._free) < self._settings.connections:
                self._free.append(link)
                return
        link.close()


class _OneServer:
    """All rollouts are on one server; behind sentinels it is whichever is the primary now."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._embedded = EmbeddedLease(settings)
        self._sentinels = Sentinels(settings)
        self._node = _Node(settings, self._find)

    def node_of(self, _: bytes, __: float) -> _Node:
        return self._node

    def learn(self, _: BaseException, __: _Node) -> None:
        """Nothing: each new connection finds the server anew."""

    def close(self) -> None:
        self._node.close()
        self._embedded.stop()

    def _find(self, deadline: float) -> Address | str:
        url = self._settings.url
        if url.topology == "sentinel":
            return follow(self._sentinels.primary(), self._settings, deadline)
        if url.scheme == "embedded":
            return self._embedded.start()
        return url.path if url.scheme == "unix" else url.addresses[0]


class _Cluster:
    """The primary of a rollout's slot."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._slots = SlotMap(settings)
        self._nodes: dict[Address, _Node] = {}
        self._loading = threading.Lock()

    def node_of(self, key: bytes, deadline: float) -> _Node:
        address = self._slots.address_of(key) or self._found(key, deadline)
        return self._node(address)

    def learn(self, error: BaseException, node: _Node) -> _Node | None:
        if isinstance(error, redis_errors.MovedError):
            node.forget_links()  # one slot has moved, or the node is a replica now
        asked = next((address for address, known in list(self._nodes.items()) if known is node), None)
        address = self._slots.learn(error, asked) if asked else None
        return None if address is None else self._node(address)

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def _node(self, address: Address) -> _Node:
        new = _Node(self._settings, lambda _: address, one_key=True)
        return self._nodes.get(address) or self._nodes.setdefault(address, new)

    def _found(self, key: bytes, deadline: float) -> Address:
        """The primary of the key's slot, from a new map that one thread asks for and all others wait for."""
        if not self._loading.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise redis_errors.TimeoutError("no map of slots in time")
        try:
            address = self._slots.address_of(key)
            if address is None:
                search = self._slots.load(list(self._nodes))
                within(deadline, partial(follow, search, self._settings, deadline), undo=lambda _: None)
                address = self._slots.address_of(key)
        finally:
            self._loading.release()
        if address is None:
            raise redis_errors.ClusterDownError("no node serves the slot")
        for gone in self._nodes.keys() - self._slots.addresses():
            self._nodes[gone].forget_links()
        return address


def _new_servers(settings: ServerSettings) -> _Servers:
    return _Cluster(settings) if settings.url.topology == "cluster" else _OneServer(settings)


_Run = Callable[[_Node, Job], list[Reply | Exception]]


def _replies(answers: Sequence[Reply | Exception]) -> list[Reply]:
    """All replies; the first error is raised, after which the connection is still good."""
    replies = []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        replies.append(answer)
    return replies


def _answer(
    group: Sequence[Sent], answer: Exception | Sequence[Reply | Exception], *, confirmed: bool
) -> None:
    """Give each step of a script call its answer.

    Raises:
        redis.exceptions.RedisError: the connection is of no more use.

    """
    if isinstance(answer, redis_errors.ReadOnlyError):  # no primary any more
        raise answer
    answers = [answer] * len(group) if isinstance(answer, Exception) else answer
    for step, each in zip(group, answers, strict=True):
        unconfirmed = not confirmed and step.call.step.writes and not isinstance(each, Exception)
        step.answer = NotConfirmedError() if unconfirmed else each
