"""The steps of ``gym_capture_redis/lua`` as pure functions on an immutable rollout.

Each function has the name of its Lua file and answers the same codes, in the same order of checks. It
takes the rollout that is there (or None) and the arguments that the file's header lists, and returns the
rollout that is there afterwards and the reply. What a rollout only counts in Redis (records, intents and so
on) is counted from its rows here; sizes, times and chain ends are left out: no step decides by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Rollout(NamedTuple):
    """One rollout: the hash under its key."""

    incarnation: str
    status: str = "open"
    snapshot: str = ""
    version: int = 0
    seq: int = 0
    traces: frozenset[tuple[int, str]] = frozenset()
    """Numbers of the steps, and what each wrote: ``n:``, ``r:``, ``x:`` or ``f:`` and the call, or ``p:`` and
    the part."""
    rows: frozenset[tuple[str, str]] = frozenset()
    """Calls, and how far each is: ``n``, or ``r:`` and the content, or ``x:`` and the code."""
    failures: frozenset[tuple[str, str, frozenset[str]]] = frozenset()
    """Calls, the first reason why each failed, and the ids of its marks."""
    blocks: frozenset[str] = frozenset()
    """Names of token blocks and parts."""


Stored = Rollout | None


class Reply(NamedTuple):
    """What a step answers; ``rest`` is what follows the version."""

    code: str
    incarnation: str
    seq: int
    version: int
    rest: tuple[object, ...] = ()


Answer = tuple[Stored, Reply]


# What every step shares (_rollout.lua) -------------------------------------------------------------------


def reply(code: str, state: Stored, *rest: object) -> Reply:
    if state is None:
        return Reply(code, "", 0, 0, rest)
    return Reply(code, state.incarnation, state.seq, state.version, rest)


def row_of(state: Stored, call: str) -> str:
    """How far the call is; '' if it has no row."""
    return next((row for name, row in state.rows if name == call), "") if state else ""


def trace_of(state: Rollout, number: int) -> str:
    """What step ``number`` wrote; '' if it left no trace."""
    return next((wrote for at, wrote in state.traces if at == number), "")


def has_failed(state: Rollout, call: str) -> bool:
    return any(name == call for name, _, _ in state.failures)


def holds(state: Rollout) -> int:
    """1 if the rollout holds an entry, a mark or an intent, else 0."""
    return int(bool(state.failures) or any(row[0] in "nr" for _, row in state.rows))


def write(
    state: Rollout, wrote: str, own: int, *, version: int = 1, row: tuple[str, str] | None = None
) -> Rollout:
    """Leave the trace of a step, under the next number or, when it is put back, under its ``own``."""
    number = own or state.seq + 1
    rows = state.rows
    if row:
        rows = frozenset(each for each in rows if each[0] != row[0]) | {row}
    return state._replace(
        seq=max(state.seq, number),
        version=state.version + version,
        traces=state.traces | {(number, wrote)},
        rows=rows,
    )


def mark_failure(state: Rollout, call: str, reason: str, own: int = 0, mark_id: str = "") -> Rollout:
    """The first reason stays."""
    failure = next((each for each in state.failures if each[0] == call), (call, reason, frozenset()))
    ids = failure[2] | ({mark_id} - {""})
    others = frozenset(each for each in state.failures if each[0] != call)
    return write(state, f"f:{call}", own)._replace(failures=others | {(call, failure[1], ids)})


# The steps -----------------------------------------------------------------------------------------------


def join(there: Stored, new_incarnation: str) -> Answer:
    state = there or Rollout(new_incarnation)
    return state, reply("OK", state)


def begin(there: Stored, new_incarnation: str, call: str, *, own: int = 0) -> Answer:
    if there and there.status != "open":
        return there, reply(there.status.upper(), there)
    if row_of(there, call):
        return there, reply("SAME", there)
    state = write(there or Rollout(new_incarnation), f"n:{call}", own, version=0, row=(call, "n"))
    return state, reply("OK", state)


def stage(there: Stored, incarnation: str, name: str, *, own: int = 0) -> Answer:
    if there is None or there.incarnation != incarnation or there.status == "retired":
        return there, reply("RETIRED", there)
    if name in there.blocks:
        return there, reply("SAME", there)
    if there.status == "frozen":
        return there, reply("FROZEN", there)
    state = write(there, f"p:{name}", own, version=0)._replace(blocks=there.blocks | {name})
    return state, reply("OK", state)


def put(
    there: Stored,
    incarnation: str,
    call: str,
    content: str,
    base: str = "",
    parts: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    *,
    own: int = 0,
) -> Answer:
    if there is None or there.incarnation != incarnation or there.status == "retired":
        return there, reply("RETIRED", there)
    row = row_of(there, call)
    settled = row not in ("", "n")
    if settled and row == f"r:{content}":
        return there, reply("SAME", there)
    if there.status == "frozen":
        return there, reply("FROZEN", there)
    if settled:
        state = mark_failure(there, call, "conflict", own)
        return state, reply("CONFLICT", state)
    if not there.blocks.issuperset(parts) or (base and base not in there.blocks):
        return there, reply("MISSING", there)
    state = write(there, f"r:{call}", own, row=(call, f"r:{content}"))
    state = state._replace(blocks=there.blocks.union(names))
    return state, reply("OK", state)


def mark(
    there: Stored, new_incarnation: str, incarnation: str, call: str, mark_id: str, *, own: int = 0
) -> Answer:
    if there and there.status == "retired":
        return there, reply("RETIRED", there)
    if incarnation and (there is None or there.incarnation != incarnation):
        return there, reply("RETIRED", there)
    if there and any(name == call and mark_id in ids for name, _, ids in there.failures):
        return there, reply("SAME", there)
    state = mark_failure(there or Rollout(new_incarnation), call, "marked", own, mark_id)
    return state, reply("OK", state)


def refuse(  # noqa: PLR0911 - in the order of the script
    there: Stored, new_incarnation: str, incarnation: str, call: str, code: str, *, own: int = 0
) -> Answer:
    if incarnation and (there is None or there.incarnation != incarnation):
        return there, reply("RETIRED", there)
    row = row_of(there, call)
    if there:
        if there.status == "retired":
            return there, reply("RETIRED", there)
        if row == f"x:{code}":
            return there, reply("SAME", there)
        if there.status == "frozen":
            return there, reply("FROZEN", there)
        if row.startswith("x:"):
            return there, reply("OTHER_CODE", there)
        if row.startswith("r:"):
            state = mark_failure(there, call, "conflict", own)
            return state, reply("CONFLICT", state)
    state = write(there or Rollout(new_incarnation), f"x:{call}", own, row=(call, f"x:{code}"))
    return state, reply("OK", state)


def freeze(there: Stored, new_incarnation: str, snapshot: str) -> Answer:
    if there and there.status == "retired":
        return there, reply("RETIRED", there)
    state = there or Rollout(new_incarnation)
    if state.status == "open":
        state = state._replace(status="frozen", snapshot=snapshot, version=state.version + 1)
    return state, reply("OK", state, state.snapshot, state)


def read(there: Stored, incarnation: str, snapshot: str, version: int) -> Answer:
    if there is None or there.incarnation != incarnation or there.status == "retired":
        return there, reply("RETIRED", there)
    if (there.snapshot, there.version) != (snapshot, version):
        return there, reply("CHANGED", there)
    return there, reply("OK", there, there)


def drop(there: Stored, snapshot: str, version: int) -> Answer:
    if there is None or there.snapshot == "" or (there.snapshot, there.version) != (snapshot, version):
        return there, reply("STALE", there)
    state = tombstone(there)
    return state, reply("OK", state)


def peek(there: Stored) -> Answer:
    return there, reply("OK", there, holds(there)) if there else reply("ABSENT", there)


def retire(there: Stored, incarnation: str, new_incarnation: str) -> Answer:
    if there is None:
        if incarnation:
            return there, reply("CHANGED", there)
        there = Rollout(new_incarnation)
    elif there.incarnation not in (incarnation, new_incarnation):
        return there, reply("CHANGED", there)
    state = tombstone(there)
    return state, reply("OK", state, holds(there))


def delete(there: Stored, incarnation: str) -> Answer:
    if there and there.incarnation != incarnation:
        return there, reply("CHANGED", there)
    return None, reply("OK", None, holds(there) if there else 0)


def tombstone(state: Rollout) -> Rollout:
    """What is left of a retired rollout."""
    return Rollout(state.incarnation, "retired", state.snapshot, state.version, state.seq)


StepFunction = Callable[..., Answer]

STEPS: Mapping[str, StepFunction] = {
    step.__name__: step
    for step in (join, begin, stage, put, mark, refuse, freeze, read, drop, peek, retire, delete)
}
