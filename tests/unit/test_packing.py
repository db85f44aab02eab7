"""Arrays become the fewest bytes that hold them, equal ones equal bytes, and come back to the last bit."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from support.names import steady_repr
from support.sample_entries import exact, finite_floats, token_ids
from support.sequences import id_array

from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.packing import (
    MAX_ID,
    Packed,
    joined_ids,
    pack_integers,
    pack_log_probs,
    pack_pieces,
    unpack_integers,
    unpack_log_probs,
)

INTEGER_TYPES = ("u1", "u2", "u3", "u4", "u8", "i1", "i2", "i4", "i8")
integer_arrays = arrays_of.arrays(
    arrays_of.integer_dtypes() | arrays_of.unsigned_integer_dtypes(),
    arrays_of.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5),
)


# Integers


@given(array=integer_arrays)
def test_integers_of_any_type_shape_and_byte_order_come_back(array: Any) -> None:
    assert unpack_integers(pack_integers(array)).reshape(array.shape).tolist() == array.tolist()


@given(array=integer_arrays)
def test_equal_integers_give_equal_bytes_in_whatever_memory_they_lie(array: Any) -> None:
    spread = np.repeat(array, 2, axis=0)[::2]
    others = [np.asfortranarray(array), spread, array.astype(array.dtype.newbyteorder())]
    assert all(pack_integers(other) == pack_integers(array) for other in others)


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (0, 0, "u1"),
        (0, 255, "u1"),
        (0, 256, "u2"),
        (0, 2**16 - 1, "u2"),
        (0, 2**16, "u3"),
        (0, 2**24 - 1, "u3"),
        (0, 2**24, "u4"),
        (0, 2**32 - 1, "u4"),
        (0, 2**32, "u8"),
        (2**64 - 1, 2**64 - 1, "u8"),
        (-1, 0, "i1"),
        (-1, -1, "i1"),
        (-128, -128, "i1"),
        (-(2**31), -(2**31), "i4"),
        (-(2**63), -(2**63), "i8"),
        (-128, 127, "i1"),
        (-129, 0, "i2"),
        (-1, 128, "i2"),
        (-(2**15), 2**15 - 1, "i2"),
        (-1, 2**15, "i4"),
        (-(2**31), 2**31 - 1, "i4"),
        (-1, 2**31, "i8"),
        (-(2**63), 2**63 - 1, "i8"),
    ],
)
@pytest.mark.parametrize("count", [1, 1_000])
def test_integers_take_the_narrowest_type_that_holds_all_of_them(
    low: int, high: int, kind: str, count: int
) -> None:
    array = np.array([low, *[high] * count], np.uint64 if low >= 0 else np.int64)
    packed = pack_integers(array)
    assert packed.type == kind
    assert len(packed.raw) == int(kind[1]) * (count + 1)
    assert unpack_integers(packed).tolist() == array.tolist()


@pytest.mark.parametrize("width", ["u1", "u8", "i4", ">i2"])
def test_no_integers_are_one_type_and_no_bytes(width: str) -> None:
    packed = pack_integers(np.empty((0, 3), width))
    assert packed == Packed("u1", b"")
    assert unpack_integers(packed).size == 0


@pytest.mark.parametrize("kind", ["", "u", "u0", "u5", "i3", "f4", "u11", "U1", "1u", "u1 ", "é1", "O8"])
def test_integers_of_an_unknown_type_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="not a packed integer array"):
        unpack_integers(Packed(kind, b""))


@pytest.mark.parametrize("kind", [kind for kind in INTEGER_TYPES if kind[1] != "1"])
def test_integers_with_a_part_of_an_element_are_refused(kind: str) -> None:
    width = int(kind[1])
    for size in range(4 * width):
        if size % width:
            with pytest.raises(ValueError, match="not a packed integer array"):
                unpack_integers(Packed(kind, b"\0" * size))
        else:
            assert unpack_integers(Packed(kind, b"\0" * size)).tolist() == [0] * (size // width)


# Pieces

PIECE_LIMITS = (1, 2**8, 2**8 + 1, 2**16, 2**16 + 1, 2**24, 2**24 + 1, 2**32, 2**32 + 1, 2**63, 2**64)
"""One more than the largest of a piece: just what each type holds, and just too much for it."""


@given(
    limits=st.lists(st.sampled_from(PIECE_LIMITS), max_size=12),
    length=st.integers(1, 300),
    rest=st.integers(0, 299),
    seed=st.integers(0, 10),
    dtype=st.sampled_from(["<u4", ">u4", "<u8", ">u8"]),
)
def test_pieces_are_packed_as_each_would_be_alone(
    limits: list[int], length: int, rest: int, seed: int, dtype: str
) -> None:
    random = np.random.default_rng(seed)
    most = [min(limit, 2 ** (8 * np.dtype(dtype).itemsize)) - 1 for limit in limits]
    rows = np.array([random.integers(0, high, length, np.uint64, endpoint=True) for high in most], np.uint64)
    for row, high in zip(rows, most, strict=True):
        row[random.integers(length)] = high
    ids = rows.ravel()[: max(0, rows.size - rest % length)].astype(dtype)
    pieces = [ids[start : start + length] for start in range(0, len(ids), length)]
    packed = pack_pieces(ids, length)
    assert packed == [pack_integers(piece) for piece in pieces]
    assert [unpack_integers(each).tolist() for each in packed] == [piece.tolist() for piece in pieces]


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_a_wide_piece_does_not_widen_the_others_in_whatever_order(place: int, dtype: type[Any]) -> None:
    largest = [limit - 1 for limit in PIECE_LIMITS if limit <= np.iinfo(dtype).max + 1]
    for order in (largest, largest[::-1]):
        rows = np.zeros((len(order), 5), dtype)
        rows[:, place] = order
        assert [packed.type for packed in pack_pieces(rows.ravel(), 5)] == [
            pack_integers(np.array([0, most], np.uint64)).type for most in order
        ]


def test_pieces_of_a_slice_are_packed_as_those_of_a_copy() -> None:
    wide = np.arange(6 * 512, dtype=np.uint32) * 5_000
    for ids in (wide[::2], wide[300:], wide[::-1]):
        assert pack_pieces(ids, 256) == pack_pieces(ids.copy(), 256)


# Token ids


@given(ids=st.lists(token_ids, max_size=8))
def test_ids_have_one_array_in_whatever_sequence_they_come(ids: list[int]) -> None:
    expected = id_array(ids)
    assert expected.dtype == ("<u8" if max(ids, default=0) >= 2**32 else "<u4")
    assert expected.tolist() == ids
    wide = np.array(ids, np.uint64)
    carriers: list[Any] = [tuple(ids), wide, wide.astype(">i8"), np.repeat(wide, 2)[::2]]
    for carrier in carriers:
        array = id_array(carrier)
        assert (array.dtype, array.tolist()) == (expected.dtype, ids)


@pytest.mark.parametrize("ids", [[0], [MAX_ID], [0, MAX_ID], []])
@pytest.mark.parametrize("carrier", [list, lambda ids: np.array(ids, np.uint64)])
def test_ids_at_the_ends_of_their_range_are_taken(ids: list[int], carrier: Any) -> None:
    assert id_array(carrier(ids)).tolist() == ids


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([np.int64(5), 6, np.uint8(7)], [5, 6, 7]),
        ([np.uint64(2**32 - 1), np.int8(0)], [2**32 - 1, 0]),
        ([np.uint64(2**32), 1], [2**32, 1]),
        ([1, np.int64(MAX_ID)], [1, MAX_ID]),
        ([True, False, 2], [1, 0, 2]),
        ([True, 2**40], [1, 2**40]),
        ((0, 2**32, 2**32 - 1), [0, 2**32, 2**32 - 1]),
        ([*range(300), 2**32], [*range(300), 2**32]),
    ],
    ids=repr,
)
def test_integers_of_any_class_in_a_list_are_ids(ids: Any, expected: list[int]) -> None:
    array = id_array(ids)
    assert array.dtype == ("<u8" if max(expected) >= 2**32 else "<u4")
    assert array.tolist() == expected
    assert id_array(tuple(ids)).tolist() == expected


@given(prompt=st.lists(token_ids, max_size=6), generation=st.lists(token_ids, max_size=6))
@pytest.mark.parametrize("carriers", [(list, list), (tuple, list), (list, np.array), (np.array, tuple)])
def test_prompt_and_generation_are_joined_in_one_array_wide_enough_for_both(
    carriers: tuple[Any, Any], prompt: list[int], generation: list[int]
) -> None:
    carried = [
        carrier(ids, np.uint64) if carrier is np.array else carrier(ids)
        for carrier, ids in zip(carriers, (prompt, generation), strict=True)
    ]
    array, prompt_length = joined_ids(*carried)
    assert (array.tolist(), prompt_length) == (prompt + generation, len(prompt))
    assert array.dtype == ("<u8" if max(prompt + generation, default=0) >= 2**32 else "<u4")


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.0, None, "1"])
def test_the_field_that_is_wrong_is_named_and_no_other(wrong: Any) -> None:
    for right in ([1, 2], [2**40], []):
        with pytest.raises(InvalidRecordError, match="prompt_token_ids"):
            joined_ids([1, wrong], right)
        with pytest.raises(InvalidRecordError, match="generation_token_ids"):
            joined_ids(right, [1, wrong])


def test_ids_taken_from_a_list_do_not_change_with_it() -> None:
    for largest in (5, 2**40):
        ids = [1, largest]
        array = id_array(ids)
        ids[0] = 9
        assert array.tolist() == [1, largest]


@pytest.mark.parametrize(
    "ids",
    [
        *(
            [np.int64(-1)],
            [0, -(2**31)],
            [-(2**63)],
            [-(2**64)],
            [2**40, -1],
            [-1, 2**40],
            [np.int8(-1), 300],
        ),
        *([np.uint64(2**63)], [np.uint64(2**64 - 1), 1], [1, 2**63], [2**400], [-(2**400)], [2**32, 2**64]),
        *([np.bool_(1)], [np.float64(1)], [1, 1.0], [2**40, 1.0], [1, None], [2**40, "1"], [b"1"], [1j]),
        *((-1,), (1.0,), (2**63,), [(1,)], [object()], [np.array([1, 2])], range(3), bytearray(b"12")),
    ],
    ids=lambda ids: steady_repr(ids)[:40],
)
def test_a_list_with_anything_else_is_refused_and_the_field_is_named(ids: Any) -> None:
    with pytest.raises(InvalidRecordError, match="generation_token_ids"):
        joined_ids([], ids)


@pytest.mark.parametrize(
    "ids",
    [
        *(None, 5, "12", b"12", {1, 2}, {1: 2}, iter([1]), deque([1])),
        *([-1], [2**63], [2**64], [1, -1], [1.0], [None], ["1"], [[1]], [np.float32(1)]),
        *(np.array([[1]]), np.array(1), np.array([1.0]), np.array([True]), np.array(["1"])),
        *(np.array([-1]), np.array([2**63], np.uint64), np.array([object()])),
    ],
    ids=steady_repr,
)
def test_what_is_no_list_of_ids_is_refused_and_the_field_is_named(ids: Any) -> None:
    with pytest.raises(InvalidRecordError, match="prompt_token_ids"):
        joined_ids(ids, [])


# Log probabilities


@given(values=st.lists(finite_floats, max_size=8))
def test_every_bit_of_a_log_probability_survives(values: list[float]) -> None:
    packed = pack_log_probs(values)
    assert exact(unpack_log_probs(*packed).tolist()) == exact(values)
    assert packed == pack_log_probs(np.array(values, np.float64)) == pack_log_probs(tuple(values))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([], "f4"),
        ([-0.5, -0.0, 0.0], "f4"),
        ([float(np.float32(-0.1))], "f4"),
        ([float.fromhex("0x1p-149")], "f4"),
        ([3.4028234663852886e38], "f4"),
        ([-0.1], "f8"),
        ([-0.5, -0.1], "f8"),
        ([5e-324], "f8"),
        ([3.5e38], "f8"),
        ([1.7976931348623157e308], "f8"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("times", [1, 1_000])
def test_a_log_probability_takes_four_bytes_if_they_hold_it(
    values: list[float], kind: str, times: int
) -> None:
    values = times * values
    packed = pack_log_probs(values)
    assert packed == pack_log_probs(np.array(values, np.float64))
    assert (packed.type, len(packed.raw)) == (kind, int(kind[1]) * len(values))
    assert exact(unpack_log_probs(*packed).tolist()) == exact(values)


@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64, ">f4"])
def test_a_log_probability_is_the_same_in_every_width_that_holds_it(width: Any) -> None:
    assert pack_log_probs(np.array([-0.5, -0.25], width)) == pack_log_probs([-0.5, -0.25])


@pytest.mark.parametrize(
    "values",
    [
        *(None, 5, "ab", [None], ["a"], [[0.0]], [10**400]),
        *([float("nan")], [0.0, float("inf")], [float("-inf")]),
        *(np.array([np.inf]), np.array([[0.0]]), np.array([0]), np.array(0.0), np.array(["a"])),
    ],
    ids=lambda values: repr(values)[:40],
)
def test_what_is_no_list_of_finite_floats_is_refused(values: Any) -> None:
    with pytest.raises(InvalidRecordError, match="generation_log_probs"):
        pack_log_probs(values)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("f2", 2),
        ("f16", 16),
        ("u4", 4),
        ("", 0),
        *(("f4", size) for size in (1, 2, 3, 5)),
        ("f8", 4),
        ("f8", 9),
    ],
)
def test_floats_of_an_unknown_type_or_with_a_part_of_an_element_are_refused(kind: str, size: int) -> None:
    with pytest.raises(ValueError, match="not a packed float array"):
        unpack_log_probs(kind, b"\0" * size)


@pytest.mark.parametrize(
    "ids", [np.array(3), np.ma.masked_array([1, 2, 3], mask=[False, True, False]), np.ones((2, 2), "i4")]
)
def test_ids_without_a_dimension_with_two_or_with_a_mask_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRecordError, match="one-dimensional array of integers"):
        joined_ids(ids, [1])
    with pytest.raises(InvalidRecordError, match="one-dimensional array of floats"):
        pack_log_probs(ids.astype("f4"))
