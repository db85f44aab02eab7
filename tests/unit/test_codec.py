"""A record is the same after the round trip, to the last bit; damaged bytes never become another one."""

from __future__ import annotations

import base64
from collections import deque
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sample_entries import (
    SMALL,
    as_numpy,
    entry_fields,
    exact,
    exact_dump,
    nested_experts,
    ragged_experts,
    sample_entry,
    token_ids,
)

from gym_capture_redis import codec, gym_compat
from gym_capture_redis.errors import (
    CorruptRecordError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from gym_capture_redis.records import TokenEntry

NO_LIMIT = 2**40
GYM_ENTRY: Any = gym_compat.gym_attribute("records", "TokenEntry")
ENTRY_CLASSES = [
    pytest.param(TokenEntry, id="ours"),
    pytest.param(GYM_ENTRY, id="gyms", marks=pytest.mark.skipif(GYM_ENTRY is None, reason="needs NeMo Gym")),
]

unhurried = settings(deadline=None)  # the machine is shared


def encode(entry: Any) -> codec.EncodedRecord:
    return codec.encode(entry, max_record_bytes=NO_LIMIT)


def decode(
    record: bytes, digest: bytes, *, of: codec.EncodedRecord, entry_type: codec.EntryType = TokenEntry
) -> Any:
    return codec.decode(
        record, digest, rollout_id=of.rollout_id, model_call_id=of.model_call_id, entry_type=entry_type
    )


def round_trip(entry: Any, entry_type: codec.EntryType = TokenEntry) -> Any:
    encoded = encode(entry)
    return decode(encoded.record, encoded.digest, of=encoded, entry_type=entry_type)


def digest_with(**changes: Any) -> bytes:
    """Digest of the small entry with fields assigned after it was built, unchecked."""
    return encode(sample_entry().model_copy(update=changes)).digest


# The round trip


@pytest.mark.parametrize("written_as", ENTRY_CLASSES)
@pytest.mark.parametrize("read_as", ENTRY_CLASSES)
@unhurried
@given(fields=entry_fields())
def test_what_is_read_back_is_what_was_put_to_the_last_bit(
    written_as: Any, read_as: Any, fields: dict[str, Any]
) -> None:
    entry = written_as(**fields)
    back = round_trip(entry, read_as)
    assert type(back) is read_as
    assert exact_dump(back) == exact_dump(entry)


@pytest.mark.parametrize(
    "value",
    [
        0.0,
        -0.0,
        1e-45,
        -1e-300,
        5e-324,
        1.7976931348623157e308,
        3.4028234663852886e38,
        -0.1,
        float.fromhex("0x1p-149"),
    ],
)
@pytest.mark.parametrize("beside", [[], [0.1], [-0.5]])
def test_every_bit_of_a_log_probability_survives(value: float, beside: list[float]) -> None:
    entry = sample_entry(generation_token_ids=[1] * (1 + len(beside)), generation_log_probs=[value, *beside])
    assert exact(round_trip(entry).generation_log_probs) == exact([value, *beside])


@pytest.mark.parametrize("created_at", [-0.0, 0.1, 1e300, 1_700_000_000.1234567])
def test_every_bit_of_a_time_survives(created_at: float) -> None:
    assert exact(round_trip(sample_entry(created_at=created_at)).created_at) == exact(created_at)


@pytest.mark.parametrize(
    "experts",
    [
        [],
        [[]],
        [[], []],
        [[[]], [[]]],
        [[[0, 255]]],
        [[[0, 256]]],
        [[[0, 65_536]]],
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
        [[1, None]],
        [["1"]],
        7,
        {"layers": [1]},
        "nrlre1:int16:1x1x2:AQACAA==",
        "nrlre1:int16:1x1x2:AQACAB==",
    ],
    ids=repr,
)
def test_routed_experts_of_any_form_and_width_survive(experts: Any) -> None:
    assert exact(round_trip(sample_entry(routed_experts=experts)).routed_experts) == exact(experts)


@pytest.mark.parametrize("experts", [[[True, 2]], [1, False]], ids=repr)
def test_a_boolean_among_expert_ids_is_not_turned_into_a_number(experts: Any) -> None:
    try:
        back = round_trip(sample_entry(routed_experts=experts))
    except InvalidRecordError:
        return  # refusing it is as exact as keeping it
    assert exact(back.routed_experts) == exact(experts)


@pytest.mark.parametrize("text", ["", "é", "日本語", "\x00", "\u2028", "𝄞", "�"])
def test_text_of_any_script_survives(text: str) -> None:
    entry = sample_entry(output_items=[{text: text}], model=text, note={text: [text]})
    assert exact_dump(round_trip(entry)) == exact_dump(entry)


@pytest.mark.parametrize("name", ["_private", "copy", "v", "model_dump", "json", "__class__", "é"])
def test_an_extra_of_any_name_survives(name: str) -> None:
    extra: dict[str, Any] = {name: {"kept": [1, 1.0, True, None]}}
    entry = sample_entry(**extra)
    assert exact_dump(round_trip(entry)) == exact_dump(entry)


# The same content, whatever carries it


@pytest.mark.parametrize(
    "carrier",
    [tuple, deque, np.array, lambda ids: np.array(ids, np.uint64), lambda ids: np.array(ids, ">i4")],
)
@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids"])
def test_ids_have_one_digest_in_whatever_sequence_they_come(field: str, carrier: Any) -> None:
    assert digest_with(**{field: carrier(SMALL[field])}) == digest_with()


@pytest.mark.parametrize(
    "carrier",
    [tuple, np.array, lambda values: [np.float64(value) for value in values]],
)
def test_log_probabilities_have_one_digest_in_whatever_sequence_they_come(carrier: Any) -> None:
    assert digest_with(generation_log_probs=carrier(SMALL["generation_log_probs"])) == digest_with()


@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64])
def test_a_log_probability_has_one_digest_in_every_width_that_holds_it(width: Any) -> None:
    values = [-0.5, -0.25]
    assert digest_with(generation_log_probs=np.array(values, width)) == digest_with(
        generation_log_probs=values
    )


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
def test_nested_experts_have_one_digest_in_whatever_carries_them(experts: Any, carrier: Any) -> None:
    assert digest_with(routed_experts=carrier(experts)) == digest_with(routed_experts=experts)


@pytest.mark.parametrize("experts", [[], [[], []], [[[]], [[]]], [[0.5, 1.0]]], ids=repr)
def test_an_array_of_experts_without_integers_is_the_same_as_its_list(experts: Any) -> None:
    assert digest_with(routed_experts=np.array(experts)) == digest_with(routed_experts=experts)


@pytest.mark.skipif(GYM_ENTRY is None, reason="needs NeMo Gym")
@unhurried
@given(fields=entry_fields())
def test_gyms_entry_and_ours_give_the_same_bytes(fields: dict[str, Any]) -> None:
    assert encode(GYM_ENTRY(**fields)) == encode(TokenEntry(**fields))


@pytest.mark.parametrize(
    "experts",
    [[[-1, 300]], [[-1, 2**40]], [[1]] * 300 + [[-1]], [[2**40]] * 300 + [[-1]], [[1]] * 300 + [[2**40]]],
    ids=["16 bits", "64 bits", "a late sign", "64 bits and a late sign", "a late width"],
)
def test_an_array_of_experts_of_mixed_sign_is_the_same_as_its_list(experts: Any) -> None:
    assert digest_with(routed_experts=np.array(experts, np.int64)) == digest_with(routed_experts=experts)


@unhurried
@given(fields=entry_fields())
def test_lists_and_arrays_give_the_same_bytes(fields: dict[str, Any]) -> None:
    entry = TokenEntry(**fields)
    try:
        carried = as_numpy(entry)
    except (ValueError, OverflowError):
        assume(False)  # ragged experts are no array
    if isinstance(carried.routed_experts, np.ndarray):
        assume(exact(carried.routed_experts.tolist()) == exact(entry.routed_experts))
    assert encode(carried) == encode(entry)


@pytest.mark.parametrize("nested", [False, True])
def test_the_order_of_dict_keys_does_not_matter(nested: bool) -> None:
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    if nested:
        assert digest_with(output_items=[one]) == digest_with(output_items=[other])
        assert digest_with(routed_experts=one) == digest_with(routed_experts=other)
    else:
        digests = {
            encode(TokenEntry(**fields)).digest
            for fields in (SMALL | {"x": 1, "y": 2}, {"y": 2, "x": 1} | dict(reversed(SMALL.items())))
        }
        assert len(digests) == 1


def test_an_assigned_value_is_the_same_content_as_a_validated_one() -> None:
    assigned = sample_entry()
    assigned.created_at = 5
    assert encode(assigned).digest == encode(sample_entry(created_at=5.0)).digest


# Other content


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "policy2"},
        {"created_at": 1_700_000_000.25},
        {"response_id": None},
        {"token_item_index": None},
        {"output_items": [{"type": "message"}]},
        {"output_items": [*SMALL["output_items"], {}]},
        {"prompt_token_ids": [1, 2, 301]},
        {"prompt_token_ids": [1, 2]},
        {
            "prompt_token_ids": [1, 2, 300, 70_000],
            "generation_token_ids": [5],
            "generation_log_probs": [-0.5],
        },
        {"prompt_token_ids": [1, 2, 300, 0]},
        {"generation_token_ids": [5, 70_000]},
        {"generation_log_probs": [-0.1, -0.5]},
        {"generation_log_probs": [-0.5, -0.10000000149011612]},
        {"routed_experts": None},
        {"routed_experts": []},
        {"routed_experts": [[[1], [2]], [[3], [4]]]},
        {"routed_experts": [[[1, 2]], [[3, 5]]]},
        {"routed_experts": [[[1.0, 2.0]], [[3.0, 4.0]]]},
        {"routed_experts": "nrlre1:int8:2x1x2:AQIDBA=="},
        {"routed_experts": "nrlre1:int16:2x1x2:AQIDBA=="},
        {"routed_experts": "[[[1,2]],[[3,4]]]"},
        {"parent_call_id": "parent"},
        {"cum_len": 5},
        {"prefix_supplied": True},
    ],
    ids=repr,
)
def test_other_content_has_another_digest(changes: dict[str, Any]) -> None:
    assert digest_with(**changes) != digest_with()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0, None),
        ("1", 1),
        ("", None),
        (0.0, -0.0),
        ([], {}),
        ([1, 2], [2, 1]),
        (2**63, float(2**63)),
    ],
)
def test_values_that_only_look_equal_have_different_digests(one: Any, other: Any) -> None:
    digests = {encode(sample_entry(extra=value)).digest for value in (one, other)}
    assert len(digests) == 2
    experts = {digest_with(routed_experts={"value": value}) for value in (one, other)}
    assert len(experts) == 2


@unhurried
@given(one=entry_fields(), other=entry_fields())
def test_two_entries_have_one_digest_exactly_if_they_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = TokenEntry(**one), TokenEntry(**other)
    same = exact_dump(first) == exact_dump(second)
    assert (encode(first).digest == encode(second).digest) == same


# Size


@pytest.mark.parametrize(
    ("largest", "bytes_per_id"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32 - 1, 4), (2**32, 8)]
)
@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids"])
def test_an_id_takes_only_the_bytes_that_the_largest_needs(
    field: str, largest: int, bytes_per_id: int
) -> None:
    count = 1_000
    arrays: dict[str, Any] = {
        "prompt_token_ids": [],
        "generation_token_ids": [],
        field: [0] * (count - 1) + [largest],
    }
    arrays["generation_log_probs"] = [-0.5] * len(arrays["generation_token_ids"])
    without = sample_entry(prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[])
    grown = len(encode(sample_entry(**arrays)).record) - len(encode(without).record)
    log_probs = 4 * len(arrays["generation_log_probs"])
    assert 0 <= grown - log_probs - bytes_per_id * count <= 8


@pytest.mark.parametrize(("value", "bytes_each"), [(-0.5, 4), (-0.1, 8)])
def test_a_log_probability_takes_four_bytes_if_they_hold_it(value: float, bytes_each: int) -> None:
    few, many = (
        encode(sample_entry(generation_token_ids=[1] * n, generation_log_probs=[value] * n))
        for n in (1_000, 2_000)
    )
    assert len(many.record) - len(few.record) == (bytes_each + 1) * 1_000


def test_a_canonical_route_string_is_held_as_its_bytes() -> None:
    raw = bytes(range(256)) * 12
    text = f"nrlre1:int8:3072x1x1:{base64.b64encode(raw).decode()}"
    grown = len(encode(sample_entry(routed_experts=text)).record) - len(
        encode(sample_entry(routed_experts=None)).record
    )
    assert grown - len(raw) < 64


def test_a_record_above_the_limit_is_refused_and_one_at_the_limit_is_not() -> None:
    size = len(encode(sample_entry()).record)
    assert len(codec.encode(sample_entry(), max_record_bytes=size).record) == size
    with pytest.raises(RecordTooLargeError, match=rf"{size} bytes.*{size - 1}.*'call' of rollout rollout"):
        codec.encode(sample_entry(), max_record_bytes=size - 1)


# What no reader could load is refused before it is sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema_version", 2),
        ("schema_version", 0),
        ("schema_version", "1x"),
        ("rollout_id", None),
        ("rollout_id", 5),
        ("model", "\ud800"),
        ("model", None),
        ("prompt_token_ids", None),
        ("prompt_token_ids", 5),
        ("prompt_token_ids", "12"),
        ("prompt_token_ids", b"12"),
        ("prompt_token_ids", [-1]),
        ("prompt_token_ids", [2**63]),
        ("prompt_token_ids", [2**64]),
        ("prompt_token_ids", [1.0]),
        ("prompt_token_ids", [None]),
        ("prompt_token_ids", ["1"]),
        ("prompt_token_ids", [[1]]),
        ("prompt_token_ids", {1, 2}),
        ("prompt_token_ids", np.array([[1, 2]])),
        ("prompt_token_ids", np.array([1.0])),
        ("prompt_token_ids", np.array([True])),
        ("prompt_token_ids", np.array([2**63], np.uint64)),
        ("prompt_token_ids", np.array([-1])),
        ("prompt_token_ids", np.array(5)),
        ("generation_token_ids", [1]),
        ("generation_token_ids", [1, 2, 3]),
        ("generation_log_probs", [float("nan"), 0.0]),
        ("generation_log_probs", [0.0, float("inf")]),
        ("generation_log_probs", np.array([0.0, -np.inf], np.float32)),
        ("generation_log_probs", ["a", "b"]),
        ("generation_log_probs", [0.0, None]),
        ("generation_log_probs", [10**400, 0.0]),
        ("generation_log_probs", [-0.5]),
        ("generation_log_probs", None),
        ("generation_log_probs", np.array([[0.0, 0.0]])),
        ("generation_log_probs", np.array([0, 1])),
        ("routed_experts", object()),
        ("routed_experts", "\ud800"),
        ("routed_experts", [[2**64]]),
        ("routed_experts", np.array([object()])),
        ("output_items", 5),
        ("output_items", [5]),
        ("output_items", [{"a": "\ud800"}]),
        ("output_items", [{"a": 2**64}]),
        ("output_items", [{"a": object()}]),
        ("token_item_index", 1),
        ("token_item_index", -1),
        ("created_at", float("nan")),
        ("created_at", "soon"),
        ("parent_resolution", "resolved"),
        ("parent_resolution", "perhaps"),
        ("prompt_is_delta", True),
        ("note", object()),
        ("note", "\udfff"),
        ("note", 2**64),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_no_reader_could_load_is_refused_and_names_the_call(field: str, value: Any) -> None:
    entry = sample_entry()
    setattr(entry, field, value)
    with pytest.raises(InvalidRecordError) as refusal:
        encode(entry)
    if field not in ("rollout_id", "model_call_id"):
        assert (refusal.value.rollout_id, refusal.value.model_call_id) == ("rollout", "call")


@pytest.mark.parametrize("value", [None, 5, "entry", {"rollout_id": "rollout"}, b"", [], SMALL])
def test_what_is_no_entry_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRecordError, match="TokenEntry"):
        encode(value)


def test_nesting_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(InvalidRecordError):
            encode(sample_entry().model_copy(update={"routed_experts": value}))
        with pytest.raises(InvalidRecordError):
            encode(sample_entry().model_copy(update={"output_items": [{"deep": value}]}))


def test_no_message_holds_token_data() -> None:
    secret = 987_654_321
    for changes in (
        {"prompt_token_ids": [secret, -1]},
        {"prompt_token_ids": [secret, "x"]},
        {"generation_log_probs": [float(secret), float("nan")]},
        {"output_items": [{"text": str(secret), "bad": object()}]},
        {"output_items": [str(secret)]},
        {"created_at": str(secret) + "x"},
    ):
        with pytest.raises(InvalidRecordError) as refusal:
            encode(sample_entry().model_copy(update=changes))
        assert str(secret) not in str(refusal.value)


# Damage

other_shapes = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from("vepglx"), inner, max_size=6),
)


def is_harmless_or_noticed(record: bytes, encoded: codec.EncodedRecord, original: Any) -> bool:
    try:
        back = decode(record, encoded.digest, of=encoded)
    except CorruptRecordError as error:
        return (error.rollout_id, error.model_call_id) == ("rollout", "call")
    return bool(exact_dump(back) == original)


@pytest.mark.parametrize(
    "experts",
    [None, [[[1, 2]], [[3, 4]]], "nrlre1:int8:2x1x2:AQIDBA==", "text", [[1], [2, 3]], {"1": None}],
    ids=["none", "nested", "route", "text", "ragged", "dict"],
)
def test_no_single_flipped_bit_becomes_another_entry(experts: Any) -> None:
    entry = sample_entry(routed_experts=experts, extra={"1": 1.5, "": True})
    encoded, original = encode(entry), exact_dump(entry)
    for bit in range(8 * len(encoded.record)):
        flipped = bytearray(encoded.record)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_harmless_or_noticed(bytes(flipped), encoded, original), f"bit {bit}"


def test_no_truncation_becomes_an_entry() -> None:
    encoded = encode(sample_entry())
    for size in range(len(encoded.record)):
        with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
            decode(encoded.record[:size], encoded.digest, of=encoded)


@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_no_truncated_or_lengthened_digest_fits(size: int) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError):
        decode(encoded.record, (encoded.digest * 2)[:size], of=encoded)


def test_no_flipped_bit_of_the_digest_fits() -> None:
    encoded = encode(sample_entry())
    for bit in range(8 * codec.DIGEST_BYTES):
        flipped = bytearray(encoded.digest)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError):
            decode(encoded.record, bytes(flipped), of=encoded)


@unhurried
@given(garbage=st.binary(max_size=200))
def test_garbage_is_never_an_entry(garbage: bytes) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError):
        decode(garbage, encoded.digest, of=encoded)


@unhurried
@given(value=other_shapes)
def test_well_formed_msgpack_of_another_shape_is_never_an_entry(value: Any) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError):
        decode(msgpack.packb(value), encoded.digest, of=encoded)


@pytest.mark.parametrize("part", ["v", "e", "p", "g", "l", "x"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2,
        "text",
        b"bytes",
        [],
        {},
        [None],
        ["u2", None],
        ["u3", b""],
        ["u2", b"odd"],
        [["u2"], b""],
        ["nested", "u1", [2**40], b"\0"],
        ["nested", "u1", [-1, -1], b"\0"],
        msgpack.ExtType(5, b"ext"),
        msgpack.Timestamp(5, 5),
    ],
    ids=repr,
)
def test_a_part_of_another_type_is_never_an_entry(part: str, value: Any) -> None:
    encoded = encode(sample_entry())
    fields = msgpack.unpackb(encoded.record) | {part: value}
    if part == "v" and value is True:
        assert is_harmless_or_noticed(msgpack.packb(fields), encoded, exact_dump(sample_entry()))
        return
    with pytest.raises(CorruptRecordError):
        decode(msgpack.packb(fields), encoded.digest, of=encoded)


@pytest.mark.parametrize(
    ("stored", "crafted"),
    [
        ({"routed_experts": "text"}, lambda fields: fields | {"x": ["json", b'"text"']}),
        ({"routed_experts": {"null": 1}}, lambda fields: fields | {"x": ["json", {None: 1}]}),
        ({"note": {"null": 1}}, lambda fields: fields | {"e": fields["e"] | {"note": {None: 1}}}),
        ({"note": {"true": 1}}, lambda fields: fields | {"e": fields["e"] | {"note": {True: 1}}}),
        ({"note": {"1": 1}}, lambda fields: fields | {"e": fields["e"] | {"note": {1: 1}}}),
        ({"note": 1}, lambda fields: fields | {"e": fields["e"] | {"note": True}}),
        ({"note": 1}, lambda fields: fields | {"e": fields["e"] | {"note": 1.0}}),
    ],
    ids=["bytes for text", "nil in experts", "nil key", "true key", "integer key", "true for 1", "1.0 for 1"],
)
def test_bytes_crafted_to_look_the_same_to_the_digest_are_noticed(
    stored: dict[str, Any], crafted: Any
) -> None:
    entry = sample_entry(**stored)
    encoded = encode(entry)
    forged = msgpack.packb(crafted(msgpack.unpackb(encoded.record)))
    assert is_harmless_or_noticed(forged, encoded, exact_dump(entry))


@pytest.mark.parametrize(("rollout_id", "model_call_id"), [("rollout", "other"), ("other", "call")])
def test_a_record_under_the_name_of_another_is_noticed(rollout_id: str, model_call_id: str) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError, match=f"'{model_call_id}' of rollout {rollout_id}"):
        codec.decode(
            encoded.record,
            encoded.digest,
            rollout_id=rollout_id,
            model_call_id=model_call_id,
            entry_type=TokenEntry,
        )


def test_a_record_of_a_newer_schema_asks_to_upgrade_the_reader() -> None:
    encoded = encode(sample_entry())
    fields = msgpack.unpackb(encoded.record)
    fields["e"]["schema_version"] = 2
    packed = {name: codec._packed(fields[name], ("u1", "u2", "u4", "f8")) for name in "pgl"}
    digest = codec._digest(fields["e"], packed["p"], packed["g"], packed["l"], fields["x"])
    with pytest.raises(UnsupportedFormatError, match=r"schema_version 2.*upgrade the reader"):
        decode(msgpack.packb(fields), digest, of=encoded)


@unhurried
@given(experts=nested_experts | ragged_experts, ids=st.lists(token_ids, max_size=4))
def test_what_was_read_back_encodes_to_the_same_bytes(experts: Any, ids: list[int]) -> None:
    entry = sample_entry(routed_experts=experts, prompt_token_ids=ids)
    assert encode(round_trip(entry)) == encode(entry)


# Details of a refusal


REFUSED_CALL = ("rollout", "call", "context-length")


@pytest.mark.parametrize("details", [{}, {"a": 1}, {"é": ["x", None, 1.5, {"b": True}]}])
def test_details_of_a_refusal_survive(details: dict[str, Any]) -> None:
    stored = codec.encode_refusal(*REFUSED_CALL, details)
    assert exact(codec.decode_refusal(*REFUSED_CALL, stored)) == exact(details)


@pytest.mark.parametrize(
    "details", [{"a": object()}, {"a": "\ud800"}, {"a": 2**64}, {"a": {1, 2}}, {"a": {1: 2}}]
)
def test_details_that_cannot_be_kept_are_refused(details: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecordError, match="details of the refusal"):
        codec.encode_refusal(*REFUSED_CALL, details)


def test_every_truncation_and_flipped_bit_of_a_refusal_is_noticed() -> None:
    stored = codec.encode_refusal(*REFUSED_CALL, {"retry_after": 3})
    damaged = [stored[:length] for length in range(len(stored))]
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for value in damaged:
        with pytest.raises(CorruptRecordError):
            codec.decode_refusal(*REFUSED_CALL, value)


def test_a_refusal_of_another_call_or_code_is_not_taken_for_this_one() -> None:
    stored = codec.encode_refusal(*REFUSED_CALL, {})
    for other in (
        ("other", "call", "context-length"),
        ("rollout", "2", "context-length"),
        ("rollout", "call", "x"),
    ):
        with pytest.raises(CorruptRecordError):
            codec.decode_refusal(*other, stored)


@pytest.mark.parametrize(
    ("changes", "large"),
    [
        ({}, True),
        ({"routed_experts": None}, False),
        ({"routed_experts": None, "prompt_token_ids": range(codec.LARGE_TOKENS)}, True),
        ({"routed_experts": None, "prompt_token_ids": None}, False),
    ],
    ids=["experts", "small", "long", "invalid"],
)
def test_only_large_records_go_to_a_thread(changes: dict[str, Any], large: bool) -> None:
    assert codec.is_large(sample_entry().model_copy(update=changes)) is large
