"""What only resembles a record is refused: never stored as something else, never a foreign exception."""

from __future__ import annotations

import array
import datetime as dt
from collections import deque
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from pydantic import model_serializer
from support.names import steady_repr
from support.sample_entries import sample_entry

from gym_capture_redis.codec import MAX_DETAILS_BYTES, encode, encode_refusal
from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.records import TokenEntry

LIMIT = 2**20


class SerializedAsText(TokenEntry):
    @model_serializer
    def as_text(self) -> str:
        return "text"


def refusal_of(entry: Any) -> InvalidRecordError:
    with pytest.raises(InvalidRecordError) as refusal:
        encode(entry, max_record_bytes=LIMIT)
    return refusal.value


def changed(**fields: Any) -> TokenEntry:
    """An entry that was valid until its caller put something else into it."""
    return sample_entry().model_copy(update=fields)


@pytest.mark.parametrize(
    "ids",
    [
        {3, 1},
        {3: 1},
        bytearray(b"ab"),
        b"ab",
        memoryview(b"ab"),
        "12",
        range(2),
        deque([1, 2]),
        array.array("I", [1, 2]),
        (number for number in [1, 2]),
        [1.0, 2.0],
        ["1"],
        [None],
        [Decimal(1)],
        [2**63],
        [-1],
        None,
        5,
        np.array([1.0]),
        np.array([[1]]),
        np.array(5),
        np.array([1, None]),
    ],
    ids=steady_repr,
)
@pytest.mark.parametrize("name", ["prompt_token_ids", "generation_token_ids"])
def test_token_ids_of_another_kind_are_refused(name: str, ids: Any) -> None:
    assert str(refusal_of(changed(**{name: ids})))


@pytest.mark.parametrize(
    "log_probs",
    [
        {-0.5, -0.1},
        {-0.5: 1, -0.1: 2},
        bytearray(b"ab"),
        b"ab",
        range(2),
        deque([-0.5, -0.1]),
        [Decimal("-0.1"), Decimal("-0.2")],
        ["-0.5", "-0.1"],
        [None, None],
        [-0.5, 1j],
        [np.longdouble(-0.5), np.longdouble(-0.1)],
        np.array([-0.5, -0.1], np.longdouble),
        np.array([[-0.5, -0.1]]),
        np.array([-0.5, None]),
        [float("nan"), -0.1],
        [float("-inf"), -0.1],
        None,
    ],
    ids=repr,
)
def test_log_probs_of_another_kind_are_refused(log_probs: Any) -> None:
    assert str(refusal_of(changed(generation_log_probs=log_probs)))


@pytest.mark.parametrize(
    "experts",
    [
        np.array(b"abc"),
        np.array("abc"),
        np.array(["2020-01-01"], "M8[ns]"),
        np.array([1], "m8[s]"),
        np.array([1j]),
        np.array([1, "a", None], object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        [[object()]],
        ["\ud800"],
    ],
    ids=steady_repr,
)
def test_routed_experts_that_are_no_numbers_and_no_json_are_refused(experts: Any) -> None:
    assert str(refusal_of(changed(routed_experts=experts)))


@pytest.mark.parametrize(
    "value", [{1}, object(), 2**64, float("nan"), b"\xff", dt.date(2020, 1, 1)], ids=steady_repr
)
def test_extra_fields_that_would_be_read_back_otherwise_are_refused_or_become_json(value: Any) -> None:
    entry = changed(note=value)
    try:
        dumped = entry.model_dump(mode="json")["note"]
        record = encode(entry, max_record_bytes=LIMIT)
    except InvalidRecordError:
        return
    except ValueError:
        assert str(refusal_of(entry))
        return
    same = encode(changed(note=dumped), max_record_bytes=LIMIT)
    assert record.seal == same.seal


@pytest.mark.parametrize("log_probs", [[-0.5], [-0.5, -0.1, -0.2], []])
def test_lengths_are_compared_as_they_are_packed(log_probs: list[float]) -> None:
    error = refusal_of(changed(generation_log_probs=log_probs))
    assert f"2 generation_token_ids but {len(log_probs)} generation_log_probs" in str(error)


def test_a_model_that_serialises_as_text_is_no_record() -> None:
    assert "serialised as something else" in str(refusal_of(SerializedAsText(**dict(sample_entry()))))


@pytest.mark.parametrize("thing", [None, {"rollout_id": "r"}, TokenEntry, "text"], ids=repr)
def test_what_is_no_model_at_all_is_refused_by_its_type(thing: Any) -> None:
    assert f"nothing of type {type(thing).__name__}" in str(refusal_of(thing))


def test_details_of_a_refusal_have_a_limit_in_packed_bytes() -> None:
    head = len(encode_refusal("r", "c", "full", {"why": ""})) - 32
    most = MAX_DETAILS_BYTES - head - 2  # msgpack counts a long text in two bytes more
    assert encode_refusal("r", "c", "full", {"why": "x" * most})
    with pytest.raises(InvalidRecordError, match=f"more than {MAX_DETAILS_BYTES}") as refusal:
        encode_refusal("r", "c", "full", {"why": "x" * (most + 1)})
    assert (refusal.value.rollout_id, refusal.value.model_call_id) == ("r", "c")


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, 2**64, "\ud800", np.int64(1), Decimal(1), {1}], ids=steady_repr
)
def test_details_that_no_reader_could_load_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRecordError, match="details of the refusal"):
        encode_refusal("r", "c", "full", {"value": value})


def test_whoever_puts_a_newer_record_is_told_what_to_do() -> None:
    said = str(refusal_of(changed(schema_version=2)))

    assert said.startswith("the record is invalid: The record has schema_version 2, and this version")
    assert "Build the record with schema_version 1, or upgrade gym-capture-redis" in said
