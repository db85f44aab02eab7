"""Marks that could not be made in Redis, as the lines of a spill file. No I/O here.

A line is a JSON object that ends with a checksum of the rest of it (docs/operations.md). It tells all that
is needed to make the mark later: on which server, on which attempt of the rollout, and by which id, so that
it is made once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from gym_capture_redis.keys import validate_call_id, validate_namespace, validate_rollout_id
from gym_capture_redis.settings import ServerSettings

LINE_FORMAT = 1
"""The newest format of a line that this version reads and writes."""

_CHECK_BYTES = 8
_MARK_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_INCARNATION = re.compile(r"[0-9a-f-]*", re.ASCII)


class Target(NamedTuple):
    """Where a mark belongs: server and database as the URL names them, without credentials, and namespace."""

    server: str
    db: int
    namespace: str

    @classmethod
    def of(cls, settings: ServerSettings) -> Target:
        """Where a client with these settings works."""
        return cls(str(settings.url), settings.url.db, settings.namespace)


class Mark(NamedTuple):
    """A rollout lost a call, as ``mark_incomplete`` was told."""

    target: Target
    rollout_id: str
    model_call_id: str
    incarnation: str
    """The attempt that the call was announced to; empty for whichever is there."""
    run_id: str
    """Run id of the server that answered the announcement; empty if unknown."""
    at_ms: int
    mark_id: str

    def line(self) -> bytes:
        """The line of a spill file, with its end."""
        fields = {
            "format": LINE_FORMAT,
            "server": self.target.server,
            "db": self.target.db,
            "namespace": self.target.namespace,
            "rollout": self.rollout_id,
            "call": self.model_call_id,
            "incarnation": self.incarnation,
            "run_id": self.run_id,
            "at_ms": self.at_ms,
            "mark": self.mark_id,
        }
        return json.dumps(fields | {"check": _check(fields)}).encode("ascii") + b"\n"


class Line(NamedTuple):
    """One line as it was found. Without mark and problem it is of a newer format."""

    text: bytes
    mark: Mark | None = None
    problem: str = ""
    """``torn``: the last one, whose writer did not come to its end; ``damaged``: any other unreadable one."""


def read_lines(content: bytes) -> list[Line]:
    """Read all lines of a spill file."""
    *whole, last = content.split(b"\n")
    lines = [_read(text, "damaged") for text in whole if text]
    return [*lines, _read(last, "torn")] if last else lines


def marks_for(target: Target, lines: Iterable[Line]) -> list[Mark]:
    """The marks that belong to ``target``, in order."""
    return [line.mark for line in lines if line.mark is not None and line.mark.target == target]


def what_stays(lines: Iterable[Line], made: Iterable[str]) -> bytes:
    """Content of the file without the marks whose ids are in ``made``, and without unreadable lines."""
    gone = set(made)
    return b"".join(
        line.text + b"\n"
        for line in lines
        if not line.problem and (line.mark is None or line.mark.mark_id not in gone)
    )


def _read(text: bytes, problem: str) -> Line:
    try:
        return Line(text, _parse(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Line(text, problem=problem)


def _parse(text: bytes) -> Mark | None:
    """The mark; None for a line in a newer format, whose fields are not known here."""
    fields: Any = json.loads(text)
    if not isinstance(fields, dict) or fields.pop("check") != _check(fields):
        raise ValueError("not what was written")
    if fields["format"] != LINE_FORMAT:
        return None
    target = Target(fields["server"], fields["db"], validate_namespace(fields["namespace"]))
    rollout_id = validate_rollout_id(fields["rollout"])
    call = validate_call_id(fields["call"], rollout_id=rollout_id, allow_empty=True)
    if not _INCARNATION.fullmatch(fields["incarnation"]) or not _MARK_ID.fullmatch(fields["mark"]):
        raise ValueError("not a mark")
    run_id, at_ms = str(fields["run_id"]), int(fields["at_ms"])
    return Mark(target, rollout_id, call, fields["incarnation"], run_id, at_ms, fields["mark"])


def _check(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
    return hashlib.blake2b(canonical, digest_size=_CHECK_BYTES).hexdigest()
