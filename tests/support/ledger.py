"""A ledger of acknowledged steps: one line each, appended to a file by the process that heard the answer.

The file is outside of everything that is hurt, and a process that is killed has written every line of what it
was told. What the lines must agree with is in ``verdict.py``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from support.polling import wait_until
from support.sample_entries import exact_dump

from gym_capture_redis.errors import BackendUnavailableError, CaptureError, TokenCaptureRetiredError
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

PATIENCE_S = 60.0


class Kind(StrEnum):
    """What was acknowledged; ``FAILED`` is what was not."""

    INTENT = "intent"
    RECORD = "record"
    REFUSAL = "refusal"
    MARK = "mark"
    SNAPSHOT = "snapshot"
    DROP = "drop"
    FAILED = "failed"


@dataclass(frozen=True)
class Line:
    """``began_ns``: before the step was sent; ``ended_ns``: after it was answered; on one clock for all."""

    kind: Kind
    rollout: str
    call: str
    began_ns: int
    ended_ns: int
    facts: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """Written by any number of processes; a line is one ``write``, so that none is torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, kind: Kind, rollout: str, call: str, began_ns: int, **facts: Any) -> None:
        line = Line(kind, rollout, call, began_ns, time.monotonic_ns(), facts)
        os.write(self._file, json.dumps(asdict(line)).encode() + b"\n")

    def lines(self) -> list[Line]:
        return LedgerTail(self.path).new_lines()

    def count(self, kind: Kind) -> int:
        return self.path.read_bytes().count(b'{"kind": "%s"' % kind.encode())

    def wait_for(self, kind: Kind, count: int) -> None:
        """Until there are so many lines of this kind."""
        what = f"there were {count} lines of {kind}"
        wait_until(lambda: self.count(kind) >= count, what, timeout_s=PATIENCE_S)

    def close(self) -> None:
        os.close(self._file)


class LedgerTail:
    """What others write into a ledger, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def new_lines(self) -> list[Line]:
        """Those that were written since the last time."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # it is being written
        self._read_bytes += sum(map(len, lines))
        return [Line(**raw | {"kind": Kind(raw["kind"])}) for raw in map(json.loads, lines)]


class RecordedSink:
    """A worker that writes down what it was told."""

    def __init__(self, sink: RedisTokenSink, ledger: Ledger) -> None:
        self._sink = sink
        self._ledger = ledger

    async def announce(self, entry: TokenEntry) -> bool:
        """Announce a call; False if that failed, and the call is not made."""
        began_ns = time.monotonic_ns()
        rollout, call = entry.rollout_id, entry.model_call_id
        try:
            await self._sink.begin_call(rollout, call)
        except CaptureError as error:
            self._failed("begin_call", rollout, call, began_ns, error)
            return False
        self._ledger.write(Kind.INTENT, rollout, call, began_ns, content=fingerprint(entry))
        return True

    async def put(self, entry: TokenEntry) -> None:
        """Put a record, and mark its rollout where that fails, as the capture flow does."""
        began_ns = time.monotonic_ns()
        rollout, call = entry.rollout_id, entry.model_call_id
        try:
            await self._sink.put(entry)
        except CaptureError as error:
            self._failed("put", rollout, call, began_ns, error)
            await self.mark(rollout, call)
        else:
            self._ledger.write(Kind.RECORD, rollout, call, began_ns)

    async def refuse(self, rollout: str, call: str) -> None:
        began_ns = time.monotonic_ns()
        try:
            await self._sink.record_engine_refusal(rollout, model_call_id=call, code="full")
        except CaptureError as error:
            self._failed("record_engine_refusal", rollout, call, began_ns, error)
            await self.mark(rollout, call)
        else:
            self._ledger.write(Kind.REFUSAL, rollout, call, began_ns)

    async def mark(self, rollout: str, call: str) -> None:
        began_ns = time.monotonic_ns()
        try:
            await self._sink.mark_incomplete(rollout, call)
        except CaptureError as error:
            self._failed("mark_incomplete", rollout, call, began_ns, error)
        else:
            self._ledger.write(Kind.MARK, rollout, call, began_ns)

    def _failed(self, step: str, rollout: str, call: str, began_ns: int, error: CaptureError) -> None:
        self._ledger.write(
            Kind.FAILED, rollout, call, began_ns, step=step, error=type(error).__name__, why=str(error)
        )


class RecordedSource:
    """A trainer that writes down what it was told. What is not answered in time is asked again by it."""

    def __init__(self, source: RedisTokenSource, ledger: Ledger) -> None:
        self._source = source
        self._ledger = ledger

    async def freeze(self, rollout: str) -> TokenCaptureSnapshot | None:
        """None if the rollout is retired."""
        while True:
            began_ns = time.monotonic_ns()
            try:
                snapshot = await self._source.freeze(rollout)
            except TokenCaptureRetiredError:
                return None
            except BackendUnavailableError as error:
                self._failed("freeze", rollout, began_ns, error)
            else:
                break
        self._ledger.write(
            Kind.SNAPSHOT,
            rollout,
            "",
            began_ns,
            id=snapshot.snapshot_id,
            version=snapshot.version,
            incomplete=snapshot.incomplete,
            reasons=[str(reason) for reason in snapshot.reasons],
            entries=[[entry.model_call_id, fingerprint(entry)] for entry in snapshot.entries],
            refused=[refusal.model_call_id for refusal in snapshot.refusals],
        )
        return snapshot

    async def drop(self, snapshot: TokenCaptureSnapshot) -> bool:
        rollout, snapshot_id, version = snapshot.rollout_id, snapshot.snapshot_id, snapshot.version
        while True:
            began_ns = time.monotonic_ns()
            try:
                dropped = await self._source.drop(rollout, snapshot_id=snapshot_id, version=version)
            except BackendUnavailableError as error:
                self._failed("drop", rollout, began_ns, error)
            else:
                break
        self._ledger.write(Kind.DROP, rollout, "", began_ns, id=snapshot_id, version=version, dropped=dropped)
        return dropped

    def _failed(self, step: str, rollout: str, began_ns: int, error: CaptureError) -> None:
        self._ledger.write(
            Kind.FAILED, rollout, "", began_ns, step=step, error=type(error).__name__, why=str(error)
        )


def fingerprint(entry: Any) -> str:
    """Of the exact content, every bit of it."""
    return hashlib.sha256(repr(exact_dump(entry)).encode()).hexdigest()[:16]
