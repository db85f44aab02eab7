"""Putting back what a server forgot (``_heal.lua``, ``verify.lua``), and what a reader sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from model.steps import (
    Answer,
    Rollout,
    StepFunction,
    Stored,
    has_failed,
    mark_failure,
    reply,
    row_of,
    trace_of,
    write,
)

KIND = {"begin": "n:", "put": "r:", "mark": "f:", "refuse": "x:", "stage": "p:"}
"""How the trace of a step begins that workers put back."""

SUBJECT_AT = {"begin": 1, "put": 1, "mark": 2, "refuse": 2, "stage": 1}
"""Which of its arguments is the call, or the part."""


class Kept(NamedTuple):
    """An acknowledged step, as its worker keeps it."""

    step: str
    args: tuple[Any, ...]
    incarnation: str
    own: int
    """Number under which it was acknowledged; 0 if that is not known."""
    run: int
    """Which server acknowledged it."""
    waits: int = 0
    """On which server it waits for what others have to put back first; 0 for none."""

    @property
    def subject(self) -> str:
        return str(self.args[SUBJECT_AT[self.step]])

    @property
    def trace(self) -> str:
        return KIND[self.step] + self.subject


@dataclass(frozen=True)
class HealRules:
    """What healing does. Each rule that is switched off is a fault that the checker must find."""

    sees_collisions: bool = True
    """A step whose number another one has taken meanwhile is run under a new number, and marks its call."""
    knows_its_own: bool = True
    """A step that finds its trace is not run again (a put or a refusal is: it may be of other content)."""
    marks_absent: bool = True
    """Where the attempt is not there, it is marked; it is not begun again: it may have been deleted."""


def heal(there: Stored, step: StepFunction, kept: Kept, new_incarnation: str, rules: HealRules) -> Answer:
    """Put a step back under its own number (``_heal.lua``)."""
    if there and there.status == "retired":
        return there, reply("RETIRED", there)
    if there is None or there.incarnation != kept.incarnation:
        if there or rules.marks_absent:
            return lost_rollout(there, new_incarnation)
        there = Rollout(kept.incarnation)
    return put_back(claim(there, kept.own), step, kept, rules)


def put_back(state: Rollout, step: StepFunction, kept: Kept, rules: HealRules) -> Answer:
    """Run the step, unless what it wrote is there."""
    trace = trace_of(state, kept.own) if kept.own else ""
    # A part that was there already is put back without its name.
    is_there = trace == kept.trace or (kept.step == "stage" and trace == "p:")
    collided = bool(trace) and not is_there
    if is_there and rules.knows_its_own and kept.step not in ("put", "refuse"):
        return state, reply("SAME", state)
    if collided and not rules.sees_collisions:
        return state, reply("SAME", state)
    own = 0 if trace else kept.own
    if kept.step == "begin" and row_of(state, kept.subject) and rules.knows_its_own:
        answer = reply("SAME", state)  # also of a frozen rollout
    else:
        stored, answer = step(state, *kept.args, own=own)
        assert stored is not None
        state = stored
    if answer.code == "SAME" and own and state.status == "open":
        # Put back in another way: the number is not missing.
        state = write(state, kept.trace if kept.step != "stage" else "p:", own, version=0)
    if answer.code in ("MISSING", "CONFLICT"):
        return state, answer
    moved = collided or (kept.own == 0 and answer.code == "OK")
    if answer.code not in ("OK", "SAME") or (moved and kept.step != "mark"):
        return lost(state, "" if kept.step == "stage" else kept.subject)
    return state, reply(answer.code, state)


def claim(state: Rollout, number: int) -> Rollout:
    """Let no other step have this number: what is not put back stays a hole that shows."""
    if state.status != "open" or number <= state.seq:
        return state
    return state._replace(seq=number)


def lost(state: Rollout, call: str) -> Answer:
    after = mark_failure(state, call, "lost")
    return after, reply("LOST", after)


def lost_rollout(there: Stored, new_incarnation: str) -> Answer:
    """Mark the rollout as a whole, once."""
    if there and has_failed(there, ""):
        return there, reply("LOST", there)
    return lost(there or Rollout(new_incarnation), "")


def verify(
    there: Stored, new_incarnation: str, incarnation: str, seq: int, own: int = 0, trace: str = ""
) -> Answer:
    """Mark the rollout if it is not the attempt that was acknowledged; show it if it has fewer steps.

    ``own`` and ``trace`` are of the newest step of the worker that asks: another step may have its number.
    """
    if there and there.status == "retired":
        return there, reply("RETIRED", there)
    if there is None or there.incarnation != incarnation:
        return lost_rollout(there, new_incarnation)
    if trace_of(there, own) not in ("", trace) and not there.failures:
        return lost_rollout(there, new_incarnation)
    state = claim(there, seq)
    if state.seq < seq:
        return lost_rollout(state, new_incarnation)
    return state, reply("OK", state)


class Seen(NamedTuple):
    """What a snapshot shows."""

    records: frozenset[tuple[str, str]]
    refusals: frozenset[tuple[str, str]]
    open_calls: frozenset[str]
    failures: frozenset[str]
    steps_lost: bool
    """Whether a number has no trace: the hash has fewer fields than its counts say."""

    @property
    def complete(self) -> bool:
        return not (self.open_calls or self.failures or self.steps_lost)


def snapshot_of(state: Rollout) -> Seen:
    """What a reader makes of a frozen rollout."""
    return Seen(
        frozenset((call, row[2:]) for call, row in state.rows if row[0] == "r"),
        frozenset((call, row[2:]) for call, row in state.rows if row[0] == "x"),
        frozenset(call for call, row in state.rows if row[0] == "n"),
        frozenset(call for call, _, _ in state.failures),
        len(state.traces) < state.seq,
    )
