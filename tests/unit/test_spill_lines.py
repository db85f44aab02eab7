"""The lines of a spill file: what was written is read again, and nothing else is taken for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture_redis.marks import Mark, Target, _check, marks_for, read_lines, what_stays
from gym_capture_redis.settings import SinkSettings

HERE = Target("redis://server:6379/0", 0, "run")
MARK = Mark(HERE, "rollout", "call", "0" * 32, "1" * 40, 1_700_000_000_000, "a" * 16)
OTHER = MARK._replace(mark_id="b" * 16)

call_ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def rewritten(**fields: Any) -> bytes:
    """The line of MARK with other fields, and a checksum that fits them."""
    known = json.loads(MARK.line()) | fields
    del known["check"]
    return json.dumps(known | {"check": _check(known)}).encode() + b"\n"


@given(call_ids)
def test_a_mark_is_read_as_it_was_written(call: str) -> None:
    mark = MARK._replace(model_call_id=call)
    line = mark.line()
    assert line.count(b"\n") == 1
    assert [found.mark for found in read_lines(line)] == [mark]


@given(st.integers(min_value=1, max_value=len(MARK.line()) - 2))
def test_a_line_that_was_cut_off_is_torn(length: int) -> None:
    whole, torn = read_lines(OTHER.line() + MARK.line()[:length])
    assert (whole.mark, torn.mark, torn.problem) == (OTHER, None, "torn")


def test_a_last_line_that_lacks_only_its_end_is_whole() -> None:
    assert [found.mark for found in read_lines(MARK.line()[:-1])] == [MARK]


@given(st.integers(min_value=0, max_value=len(MARK.line()) - 2), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    changed = bytearray(MARK.line())
    changed[at] ^= change
    lines = read_lines(bytes(changed) + OTHER.line())
    marks = [line.mark for line in lines if line.mark]
    # White space between the fields means nothing, so a changed one may leave the same mark.
    assert marks in ([OTHER], [MARK, OTHER])
    assert all(line.problem == "damaged" for line in lines if not line.mark)


@pytest.mark.parametrize(
    "fields",
    [
        {"rollout": "a/b"},
        {"rollout": 7},
        {"call": "x" * 1025},
        {"call": "\ud800"},
        {"namespace": ""},
        {"mark": "a"},
        {"mark": "A" * 16},
        {"incarnation": "a b"},
        {"incarnation": None},
        {"at_ms": "now"},
    ],
    ids=str,
)
def test_a_line_that_no_sink_writes_is_damaged_though_its_checksum_fits(fields: dict[str, Any]) -> None:
    (line,) = read_lines(rewritten(**fields))
    assert (line.mark, line.problem) == (None, "damaged")


@pytest.mark.parametrize("text", [b"null", b"[]", b"{}", b"7", b"\xff", b"\0" * 40, b"[" * 100_000])
def test_what_is_no_line_at_all_is_damaged(text: bytes) -> None:
    assert [line.problem for line in read_lines(text + b"\n")] == ["damaged"]


def test_a_line_of_a_newer_format_is_neither_a_mark_nor_damaged_and_stays() -> None:
    newer = rewritten(format=2, rollout={"anything": 1})
    lines = read_lines(newer + MARK.line())
    assert [(line.mark, line.problem) for line in lines] == [(None, ""), (MARK, "")]
    assert what_stays(lines, [MARK.mark_id]) == newer


@pytest.mark.parametrize(
    "target",
    [HERE._replace(server="redis://other:6379/0"), HERE._replace(db=1), HERE._replace(namespace="n")],
)
def test_only_the_marks_of_a_target_are_chosen_and_all_others_stay(target: Target) -> None:
    elsewhere = OTHER._replace(target=target)
    lines = read_lines(MARK.line() + b"damage\n" + elsewhere.line() + b"torn")
    assert marks_for(HERE, lines) == [MARK]
    assert marks_for(target, lines) == [elsewhere]
    assert what_stays(lines, [MARK.mark_id]) == elsewhere.line()


def test_a_target_has_no_credentials_and_tells_databases_of_a_unix_socket_apart() -> None:
    first, second = (Target.of(SinkSettings.build(f"unix:///run/s?db={db}", "run", {})) for db in (1, 2))
    assert first != second
    with_password = SinkSettings.build("redis://user:secret@server/3", "run", {"password": "hidden"})
    line = MARK._replace(target=Target.of(with_password)).line()
    assert b"redis://server:6379/3" in line
    assert not any(word in line for word in (b"user", b"secret", b"hidden"))
