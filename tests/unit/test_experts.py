"""Routed experts are exact after the round trip, and have one form in whatever carries them."""

from __future__ import annotations

import base64
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from support.sample_entries import exact, nested_experts, routed_experts

from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.experts import expert_bytes, in_one, pack_experts, unpack_experts


def packed(experts: Any) -> bytes:
    """The form of experts as it is stored."""
    form: bytes = msgpack.packb(in_one(pack_experts(experts)))
    return form


def round_trip(experts: Any, *, arrays: bool = False) -> Any:
    return unpack_experts(msgpack.unpackb(packed(experts)), arrays=arrays)


# The round trip


@given(experts=routed_experts)
def test_any_experts_survive(experts: Any) -> None:
    assert exact(round_trip(experts)) == exact(experts)


@pytest.mark.parametrize(
    "experts",
    [
        None,
        [],
        [[]],
        [[], []],
        [[[]], [[]]],
        [[[0, 255]]],
        [[[0, 256]]],
        [[[0, 65_536]]],
        [[[0, 2**24]]],
        [[[0, 2**32]]],
        [[[0, 2**64 - 1]]],
        [[[-1, 127]]],
        [[[-1, 128]]],
        [[[-(2**63), 0]]],
        [[[-1, 2**63]]],
        [[1], [2, 3]],
        [[1.0, 2.0]],
        [[1, 2.0]],
        [[True, False]],
        [[[True, 2]]],
        [1, False],
        [[1, None]],
        [["1"]],
        7,
        {"layers": [1]},
        "nrlre1:int16:1x1x2:AQACAA==",
        "nrlre1:int16:1x1x2:AQACAB==",
    ],
    ids=repr,
)
def test_experts_of_any_form_and_width_survive(experts: Any) -> None:
    assert exact(round_trip(experts)) == exact(experts)


@given(experts=nested_experts)
def test_nested_experts_come_back_as_one_array_where_arrays_are_wanted(experts: Any) -> None:
    back = round_trip(experts, arrays=True)
    assert exact(back.tolist() if isinstance(back, np.ndarray) else back) == exact(experts)


@pytest.mark.parametrize(
    "experts", [None, "nrlre1:int8:1x1x2:AQI=", "text", [[1], [2, 3]], {"a": 1}], ids=repr
)
def test_experts_that_are_no_rectangle_are_the_same_where_arrays_are_wanted(experts: Any) -> None:
    assert exact(round_trip(experts, arrays=True)) == exact(experts)


# The same content, whatever carries it


@pytest.mark.parametrize(
    "carrier",
    [
        np.array,
        lambda experts: np.array(experts, np.int16),
        lambda experts: np.asfortranarray(np.array(experts, ">u8")),
        lambda experts: tuple(tuple(tuple(layer) for layer in token) for token in experts),
        lambda experts: [np.array(token, np.uint16) for token in experts],
    ],
    ids=["array", "int16", "fortran", "tuples", "list of arrays"],
)
@pytest.mark.parametrize("experts", [[[[1, 2]], [[3, 4]]], [[[0, 300]]]], ids=repr)
def test_nested_experts_have_one_form_in_whatever_carries_them(experts: Any, carrier: Any) -> None:
    assert packed(carrier(experts)) == packed(experts)


@pytest.mark.parametrize("experts", [[], [[], []], [[[]], [[]]], [[0.5, 1.0]]], ids=repr)
def test_an_array_of_experts_without_integers_is_the_same_as_its_list(experts: Any) -> None:
    assert packed(np.array(experts)) == packed(experts)


@pytest.mark.parametrize(
    "experts",
    [[[-1, 300]], [[-1, 2**40]], [[1]] * 300 + [[-1]], [[2**40]] * 300 + [[-1]], [[1]] * 300 + [[2**40]]],
    ids=["16 bits", "64 bits", "a late sign", "64 bits and a late sign", "a late width"],
)
def test_an_array_of_experts_of_mixed_sign_is_the_same_as_its_list(experts: Any) -> None:
    assert packed(np.array(experts, np.int64)) == packed(experts)


# Size


@pytest.mark.parametrize(
    ("largest", "bytes_per_id"), [(255, 1), (256, 2), (65_536, 3), (2**24, 4), (2**32, 8)]
)
def test_an_expert_takes_only_the_bytes_that_the_largest_needs(largest: int, bytes_per_id: int) -> None:
    experts = np.full((100, 48, 8), largest, np.uint64)
    assert 0 <= len(packed(experts)) - bytes_per_id * experts.size < 32
    assert len(packed(experts.tolist())) == len(packed(experts))


def test_a_canonical_route_string_is_held_as_its_bytes() -> None:
    raw = bytes(range(256)) * 12
    assert len(packed(f"nrlre1:int8:3072x1x1:{base64.b64encode(raw).decode()}")) - len(raw) < 64


# Damage


@pytest.mark.parametrize(
    "form",
    [
        *(0, 1, False, True, "", "text", b"", b"bytes", [], {}, {"json": 1}),
        *(["json"], ["json", b"1"], ["json", 1, 2], ["other", 1], [None], ["route", "nrlre1:int8:1x1x1:"]),
        *(["nested"], ["nested", "u1", [1]], ["nested", "u5", [1], b"\0"], ["nested", "u2", [1], b"\0"]),
        *(["nested", "u1", [2], b"\0"], ["nested", "u1", [2**40], b"\0"], ["nested", "u1", [-1, -1], b"\0"]),
        *(["nested", "u1", [0], b"\0"], ["nested", "f4", [1], b"\0" * 4]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("arrays", [False, True])
def test_an_unknown_form_is_refused(form: Any, *, arrays: bool) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack_experts(form, arrays=arrays)


def test_experts_that_hold_themselves_are_refused_and_their_size_is_asked_in_vain() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert expert_bytes(endless) >= 0
    with pytest.raises((InvalidRecordError, ValueError)):
        pack_experts(endless)


@pytest.mark.parametrize("experts", [np.array(5), np.ma.masked_array([1, 2, 3], mask=[False, True, False])])
def test_arrays_without_a_dimension_or_with_a_mask_are_refused(experts: Any) -> None:
    with pytest.raises(InvalidRecordError, match="no dimension, or masked"):
        pack_experts(experts)


@pytest.mark.parametrize("form", [{"a": "x" * 3_000}, ["x" * 3_000], "x" * 3_000, np.zeros(3_000, "u1")])
def test_the_size_of_every_form_is_counted_by_what_it_holds(form: Any) -> None:
    assert expert_bytes(form) >= 3_000
