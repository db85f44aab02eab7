"""Each law is broken by a ledger that breaks it, and by no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.ledger import Kind, Line
from support.verdict import violations

WHOLE = {"id": "s", "version": 4, "incomplete": False, "entries": [["c", "content"]], "refused": ["x"]}


def line(kind: Kind, call: str, at: int, **facts: Any) -> Line:
    return Line(kind, "r", call, began_ns=at, ended_ns=at + 1, facts=facts)


STORY = {
    "intent": line(Kind.INTENT, "c", 10, content="content"),
    "record": line(Kind.RECORD, "c", 20),
    "intent of x": line(Kind.INTENT, "x", 22, content="never"),
    "refusal": line(Kind.REFUSAL, "x", 25),
    "snapshot": line(Kind.SNAPSHOT, "", 30, **WHOLE),
    "again": line(Kind.SNAPSHOT, "", 40, **WHOLE),
    "drop": line(Kind.DROP, "", 50, id="s", version=4, dropped=True),
}


def story(**changes: Line | None) -> list[Line]:
    """The story above with some lines added, replaced or (None) left out."""
    return [line for line in (STORY | changes).values() if line is not None]


def snapshots(**facts: Any) -> dict[str, Line]:
    return {name: replace(STORY[name], facts=WHOLE | facts) for name in ("snapshot", "again")}


def test_a_story_in_which_nothing_went_wrong_breaks_no_law() -> None:
    assert violations(story(), server_kept_all=True) == []


@pytest.mark.parametrize(
    ("lines", "law"),
    [
        (story(**snapshots(entries=[])), "the record of call c was acknowledged and is not there"),
        (story(record=None, **snapshots(entries=[])), "call c was announced and never came"),
        (story(**snapshots(refused=[])), "the refusal of call x was acknowledged and is not there"),
        (story(mark=line(Kind.MARK, "lost", 27)), "call lost was marked as lost"),
        (story(mark=line(Kind.MARK, "lost", 45)), "was dropped as complete, though call lost was marked"),
        (story(**snapshots(entries=[["c", "content"]] * 2)), "call c is 2 times in"),
        (
            story(**snapshots(entries=[["c", "other"]])),
            "call c of snapshot s at version 4 is not what was put",
        ),
        (story(drop=line(Kind.DROP, "", 50, id="s", version=5, dropped=True)), "was dropped and never read"),
    ],
)
def test_what_no_fault_excuses_is_found(lines: list[Line], law: str) -> None:
    assert any(law in text for text in violations(lines)), violations(lines)


@pytest.mark.parametrize(
    ("lines", "law"),
    [
        (story(**snapshots(entries=[], incomplete=True)), "acknowledged records are not in"),
        (story(again=line(Kind.SNAPSHOT, "", 40, **WHOLE | {"id": "t"})), "became snapshot t"),
        (
            story(again=line(Kind.SNAPSHOT, "", 40, **WHOLE | {"version": 3}), drop=None),
            "snapshot s at version 3 came after",
        ),
        (
            story(again=line(Kind.SNAPSHOT, "", 40, **WHOLE | {"incomplete": True})),
            "was read with two contents",
        ),
        (story(late=line(Kind.RECORD, "d", 60)), "call d was put after"),
    ],
)
def test_what_only_a_server_that_forgets_excuses_is_found(lines: list[Line], law: str) -> None:
    assert violations(lines) == []
    assert any(law in text for text in violations(lines, server_kept_all=True))


def test_what_was_acknowledged_after_the_snapshot_was_asked_for_may_be_missing_in_it() -> None:
    lines = story(
        again=None,
        drop=line(Kind.DROP, "", 50, id="s", version=4, dropped=False),
        mark=line(Kind.MARK, "lost", 30),
    )
    assert violations(lines, server_kept_all=True) == []
