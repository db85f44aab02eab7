"""Attachments and extras come back as they went, or are refused in clear words."""

from __future__ import annotations

import types
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from gym_capture_redis.attachments import (
    pack_attachments,
    pack_extras,
    unpack_attachments,
    unpack_extras,
)
from gym_capture_redis.errors import InvalidRecordError

BYTE_ORDERS: Any = ("<", ">")

array_types = st.one_of(
    nps.boolean_dtypes(),
    *[
        st.one_of(
            nps.integer_dtypes(endianness=order),
            nps.unsigned_integer_dtypes(endianness=order),
            nps.floating_dtypes(endianness=order, sizes=(16, 32, 64)),
            nps.complex_number_dtypes(endianness=order, sizes=(64, 128)),
            nps.datetime64_dtypes(endianness=order),
            nps.timedelta64_dtypes(endianness=order),
            nps.byte_string_dtypes(endianness=order, min_len=1, max_len=5),
            nps.unicode_string_dtypes(endianness=order, min_len=1, max_len=5),
        )
        for order in BYTE_ORDERS
    ],
)
arrays = nps.arrays(array_types, nps.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | text
    | st.binary(max_size=20)
    | arrays
)
values = st.recursive(
    leaves, lambda inner: st.dictionaries(text, inner, max_size=4) | st.lists(inner, max_size=4), max_leaves=8
)
attachments = st.dictionaries(text, values, max_size=5)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text,
    lambda inner: st.dictionaries(text, inner, max_size=4) | st.lists(inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and every bit."""
    if isinstance(one, np.ndarray):
        return (
            type(other) is np.ndarray
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def round_trip(value: Any) -> Any:
    return unpack_attachments(pack_attachments(value))


@given(attachments)
def test_whatever_is_packed_comes_back_to_the_last_bit(value: dict[str, Any]) -> None:
    assert same(round_trip(value), value)


@given(attachments)
def test_equal_mappings_give_equal_bytes_in_whatever_order_they_are(value: dict[str, Any]) -> None:
    assert pack_attachments(dict(reversed(value.items()))) == pack_attachments(value)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_are_attachments(raw: bytes) -> None:
    try:
        value = unpack_attachments(raw)
    except (ValueError, TypeError, msgpack.UnpackException):
        return
    assert isinstance(value, dict)


@given(attachments, st.integers(0, 10**6))
def test_bytes_cut_short_are_refused(value: dict[str, Any], at: int) -> None:
    packed = pack_attachments(value)
    with pytest.raises((ValueError, TypeError, msgpack.UnpackException)):
        unpack_attachments(packed[: at % len(packed)])
    with pytest.raises(ValueError, match=r"."):
        unpack_attachments(packed + b"x")


def test_arrays_that_are_not_contiguous_come_back_in_shape_and_writable() -> None:
    whole = np.arange(24).reshape(2, 3, 4)
    given_arrays = {"sliced": whole[:, ::2, 1:], "turned": whole.T, "fortran": np.asfortranarray(whole)}
    back = round_trip(given_arrays)
    for name, array in given_arrays.items():
        assert same(back[name], array.copy())
        back[name][...] = 0
    assert whole.any()


def test_bytes_and_mappings_of_other_classes_come_back_as_plain_ones() -> None:
    value = types.MappingProxyType(
        {
            "a": bytearray(b"x"),
            "b": memoryview(b"yz"),
            "c": OrderedDict(d=memoryview(np.arange(2, dtype="u1").data)),
        }
    )
    assert round_trip(value) == {"a": b"x", "b": b"yz", "c": {"d": b"\0\1"}}


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (object(), r"attachments\['x'\] is refused: it is of type object"),
        (np.array([object()]), "it is an array of object"),
        (np.array([(1, 2.0)], dtype="i4,f8"), "it is an array of"),
        (np.ma.masked_array([1], [True]), "it is a masked array"),
        (np.zeros(2, "S0").astype("V0"), "it is an array of void"),
        (np.zeros(1, "g"), "it is an array of"),
        (np.float32(1), "it is of type float32"),
        ((1, 2), "it is of type tuple"),
        ({1, 2}, "it is of type set"),
        (Fraction(1, 2), "it is of type Fraction"),
        ({1: b""}, r"attachments\['x'\] is refused: a name in it is no string"),
        ([b"", {"deep": object()}], r"attachments\['x'\]\[1\]\['deep'\] is refused: it is of type object"),
        (2**64, "an integer beyond 64 bits"),
        ("\ud800", "text that is no UTF-8"),
        ({"\ud800": 1}, "text that is no UTF-8"),
    ],
)
def test_what_would_not_come_back_is_refused_and_named(refused: Any, said: str) -> None:
    with pytest.raises(InvalidRecordError, match=said):
        pack_attachments({"fine": b"1", "x": refused})


def test_what_is_nested_without_end_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(InvalidRecordError, match="nested more than 32 levels deep"):
        pack_attachments(endless)


@given(st.dictionaries(text, plain, max_size=5))
def test_extras_come_back_to_the_last_bit(extras: dict[str, Any]) -> None:
    assert same(unpack_extras(pack_extras(extras)), extras)


@pytest.mark.parametrize(
    ("extras", "nbytes"),
    [
        ({"routed_experts": [[[1, 2]] * 50] * 20}, 2_100),
        ({"routed_experts": "nrlre1:int16:100x5x2:" + "AQID" * 500}, 1_600),
    ],
)
def test_routed_experts_among_the_extras_are_packed(extras: dict[str, Any], nbytes: int) -> None:
    packed = pack_extras(extras)
    assert len(packed) < nbytes
    assert same(unpack_extras(packed), extras)
