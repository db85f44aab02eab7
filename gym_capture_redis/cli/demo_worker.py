"""What one worker process of the demo does: serve calls and capture their tokens, as a model server would.

The parent sends `Job` objects through a pipe and gets the messages below back. When the pipe closes, for
whatever reason, the worker ends; so none outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gym_capture_redis import (
    CaptureContext,
    RedisTokenSink,
    capture_tokens,
    install_token_sink,
    installed_token_sink,
    register_call_intent,
    reset_token_sink,
    set_token_sink,
)
from gym_capture_redis.cli.demo_plan import Attempt, Fault
from gym_capture_redis.cli.served_calls import RecordedRollout, ServedCall, load_rollouts
from gym_capture_redis.settings import Durability

CLOSING_S = 5.0

Pipe = Connection


@dataclass(frozen=True)
class Target:
    """Where workers write: the arguments of ``RedisTokenSink``."""

    url: str
    namespace: str
    durability: Durability


@dataclass(frozen=True)
class Job:
    """Call number ``call`` of ``attempt``, to be served by whoever gets this."""

    attempt: Attempt
    call: int

    @property
    def fault(self) -> Fault:
        """What is to go wrong with it."""
        return self.attempt.fault_of(self.call)

    @property
    def response_id(self) -> str:
        """Id of the response; another one for every attempt, so that no two records are equal."""
        return f"resp-{self.attempt.rollout_id}-{self.call}"


@dataclass(frozen=True)
class Ready:
    """The worker has read the recordings and takes jobs."""


@dataclass(frozen=True)
class Announced:
    """The call's intent is durable. Sent only by a call that is then held until the worker is killed."""

    job: Job


@dataclass(frozen=True)
class Served:
    """The response was served; ``committed`` tells, for each time it was captured, whether it was stored."""

    job: Job
    committed: tuple[bool, ...]


@dataclass(frozen=True)
class Failed:
    """The model call failed, most likely because its intent could not be announced."""

    job: Job
    error: str


@dataclass(frozen=True)
class Logged:
    """A warning of the worker's log."""

    text: str


Message = Ready | Announced | Served | Failed | Logged


def run_worker(pipe: Pipe, target: Target) -> None:
    """Take jobs from ``pipe`` until it closes. The entry point of the process."""
    _send_log_to(pipe)
    # A pipe that broke has nobody left to tell.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        asyncio.run(_Worker(pipe, target).run())


class _Worker:
    """All jobs of one process, on one event loop."""

    def __init__(self, pipe: Pipe, target: Target) -> None:
        self._pipe = pipe
        self._target = target
        self._recordings: tuple[RecordedRollout, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._parent_gone = asyncio.Event()

    async def run(self) -> None:
        target = self._target
        sink = RedisTokenSink(target.url, namespace=target.namespace, durability=target.durability)
        install_token_sink(sink)
        self._recordings = load_rollouts()
        self._pipe.send(Ready())
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._receive)
        await self._parent_gone.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        install_token_sink(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(sink.close(), CLOSING_S)

    def _receive(self) -> None:
        try:
            while self._pipe.poll():
                task = asyncio.create_task(self._answer(self._pipe.recv()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._parent_gone.set()

    async def _answer(self, job: Job) -> None:
        try:
            answer: Message = await self._serve(job)
        except Exception as error:  # noqa: BLE001 - the parent decides what a failed call means
            answer = Failed(job, f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            self._pipe.send(answer)

    async def _serve(self, job: Job) -> Served:
        """Announce the call, "generate", and capture the response, as Gym's model servers do."""
        served = self._recordings[job.attempt.recording].call(job.call)
        sink: Any = installed_token_sink()
        if job.fault is Fault.REPEATED:
            sink = _PutsTwice(sink)
        context = CaptureContext(job.attempt.rollout_id, served.model_call_id, token_sink=sink)
        token = set_token_sink(context)
        try:
            await register_call_intent()
            if job.fault is Fault.HELD:
                self._pipe.send(Announced(job))
                await asyncio.Event().wait()  # generating, until the worker is killed
            with_token_ids = job.fault is not Fault.TOKENLESS
            await capture_tokens(served.response(job.response_id, with_token_ids=with_token_ids))
        finally:
            reset_token_sink(token)
        if job.fault is not Fault.CONFLICT:
            return Served(job, (context.committed,))
        return Served(job, (context.committed, await _capture_other_content(job, served)))


async def _capture_other_content(job: Job, served: ServedCall) -> bool:
    """Capture the call once more as if it had been sampled again; whether that was stored."""
    served.generation_token_ids[0] ^= 1
    context = CaptureContext(job.attempt.rollout_id, served.model_call_id, token_sink=installed_token_sink())
    token = set_token_sink(context)
    try:
        await capture_tokens(served.response(job.response_id))
    finally:
        reset_token_sink(token)
    return context.committed


class _PutsTwice:
    """A sink whose every put is sent again, as by a caller who lost the acknowledgement."""

    def __init__(self, sink: RedisTokenSink) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def put(self, entry: Any) -> None:
        await self._sink.put(entry)
        await self._sink.put(entry)


class _PipeHandler(logging.Handler):
    """Sends log records to the parent, which decides whether they are worth a line on the terminal."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        why = f" ({type(error).__name__}: {error})" if error else ""
        with contextlib.suppress(OSError):
            self._pipe.send(Logged(f"{record.levelname} {record.name}: {record.getMessage()}{why}"))


def _send_log_to(pipe: Pipe) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_PipeHandler(pipe)]
    root.setLevel(logging.WARNING)
