"""Sinks and lineage stores in another process, as in a worker; the test holds their remote controls."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Request:
    """One method call on one of the objects of the process."""

    sink: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SinkProcess:
    """A spawned process that makes objects with ``factory``, which must be picklable, and runs them."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._one_at_a_time = threading.Lock()
        self._sinks = 0
        self._process = context.Process(target=_serve, args=(theirs, factory))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def make_sink(self) -> RemoteSink:
        """Return the remote control of a new sink in the process."""
        self._sinks += 1
        return RemoteSink(self, self._sinks)

    def make_lineage_store(self) -> RemoteLineageStore:
        """Return the remote control of a new lineage store in the process."""
        self._sinks += 1
        return RemoteLineageStore(self, self._sinks)

    async def run(self, request: Request) -> Any:
        """Run a method there; what it raises there is raised here."""
        result, error = await asyncio.to_thread(self._round_trip, request)
        if error is not None:
            raise error
        return result

    def _round_trip(self, request: Request) -> tuple[Any, BaseException | None]:
        with self._one_at_a_time:
            self._connection.send(request)
            outcome: tuple[Any, BaseException | None] = self._connection.recv()
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.send(None)
        self._process.join(STOP_TIMEOUT_S)
        self._connection.close()
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class RemoteSink:
    """A ``TokenSink`` whose methods run in a ``SinkProcess``."""

    def __init__(self, process: SinkProcess, number: int) -> None:
        self._process = process
        self._number = number

    async def put(self, entry: Any) -> None:
        await self._run("put", entry)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await self._run("begin_call", rollout_id, model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await self._run("mark_incomplete", rollout_id, model_call_id)

    async def record_engine_refusal(
        self, rollout_id: str, *, model_call_id: str, code: str, **details: Any
    ) -> None:
        await self._run(
            "record_engine_refusal", rollout_id, model_call_id=model_call_id, code=code, **details
        )

    async def close(self) -> None:
        await self._run("close")

    async def _run(self, method: str, *args: Any, **kwargs: Any) -> None:
        await self._process.run(Request(self._number, method, args, kwargs))


class RemoteLineageStore:
    """A lineage store whose ``resolve`` runs in a ``SinkProcess``."""

    def __init__(self, process: SinkProcess, number: int) -> None:
        self._process = process
        self._number = number

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        return await self._process.run(Request(self._number, "resolve", (rollout_id, request_items), {}))

    async def close(self) -> None:
        await self._process.run(Request(self._number, "close", (), {}))


def _serve(connection: Connection, factory: Callable[[], Any]) -> None:
    """Body of the process: one event loop, and requests answered one after the other."""
    with asyncio.Runner() as runner, connection:
        sinks: dict[int, Any] = {}
        while (request := connection.recv()) is not None:
            sink = sinks.get(request.sink) or sinks.setdefault(request.sink, factory())
            connection.send(runner.run(_outcome(sink, request)))


async def _outcome(sink: Any, request: Request) -> tuple[Any, BaseException | None]:
    try:
        return await getattr(sink, request.method)(*request.args, **request.kwargs), None
    except Exception as error:  # noqa: BLE001 - it is raised where it was asked for
        return None, error
