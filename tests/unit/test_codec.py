"""A record is the same after the round trip, to the last bit; damaged bytes never become another one."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.names import steady_repr
from support.sample_entries import (
    SMALL,
    as_numpy,
    entry_fields,
    exact,
    exact_dump,
    long_ids,
    nested_experts,
    ragged_experts,
    sample_entry,
    token_ids,
)
from support.sequences import random_ids, tree_of

from gym_capture_redis import codec, gym_compat, small_fields, taking
from gym_capture_redis.blocks import NAME_BYTES, ROOT, BlockTree, TokenSequence
from gym_capture_redis.errors import (
    CorruptRecordError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from gym_capture_redis.parts import PartStore
from gym_capture_redis.records import TokenEntry

NO_LIMIT = 2**40
GYM_ENTRY: Any = gym_compat.gym_attribute("records", "TokenEntry")
ENTRY_CLASSES = [
    pytest.param(TokenEntry, id="ours"),
    pytest.param(GYM_ENTRY, id="gyms", marks=pytest.mark.skipif(GYM_ENTRY is None, reason="needs NeMo Gym")),
]

LONG: dict[str, Any] = {"prompt_token_ids": random_ids(600), "rollout_id": "rollout"}
"""A prompt of two token blocks and a tail."""

BLOCK_OVERHEAD = NAME_BYTES + 2
"""Bytes of a block besides its ids: the name of its parent and the type."""


def encode(entry: Any) -> codec.EncodedRecord:
    return codec.encode(entry, max_record_bytes=NO_LIMIT)


def parts_of(encoded: codec.EncodedRecord) -> PartStore:
    store = PartStore()
    for name, content in encoded.parts:
        store.add(name, content)
    return store


def decode(
    record: bytes,
    seal: bytes,
    *,
    of: codec.EncodedRecord,
    entry_type: codec.EntryType = TokenEntry,
    arrays: bool = False,
    beside: tuple[TokenSequence, ...] = (),
) -> Any:
    parsed = codec.parse(record, seal, rollout_id=of.rollout_id, model_call_id=of.model_call_id)
    tree = tree_of(of.sequence, *beside)
    entry = codec.build(parsed, tree, parts_of(of), entry_type, arrays=arrays)
    codec.give_tokens(entry, parsed, tree, arrays=arrays)
    return entry


def round_trip(entry: Any, entry_type: codec.EntryType = TokenEntry) -> Any:
    encoded = encode(entry)
    return decode(encoded.record, encoded.seal, of=encoded, entry_type=entry_type)


def stored(entry: Any) -> tuple[bytes, bytes, list[tuple[bytes, bytes]]]:
    """All that is stored of an entry: seal, record and token blocks."""
    encoded = encode(entry)
    return encoded.seal, encoded.record, encoded.sequence.blocks_from(0)


def stored_bytes(entry: Any) -> int:
    """Bytes of record and blocks, without those that every block needs besides its ids."""
    _, record, blocks = stored(entry)
    return len(record) + sum(len(value) - BLOCK_OVERHEAD for _, value in blocks)


def digest_of(entry: Any) -> bytes:
    """By which a repeated put is known."""
    return encode(entry).seal[: codec.DIGEST_BYTES]


def digest_with(**changes: Any) -> bytes:
    """Digest of the small entry with fields assigned after it was built, unchecked."""
    return digest_of(sample_entry().model_copy(update=changes))


# The round trip


@pytest.mark.parametrize("written_as", ENTRY_CLASSES)
@pytest.mark.parametrize("read_as", ENTRY_CLASSES)
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


@pytest.mark.parametrize("prompt", [0, 255, 256, 257, 600, 1_024])
@pytest.mark.parametrize("generated", [0, 1, 255, 256, 300])
@pytest.mark.parametrize("below", [2**8, 2**17, 2**32, 2**63])
def test_token_ids_survive_wherever_prompt_and_blocks_end(prompt: int, generated: int, below: int) -> None:
    ids = random_ids(prompt + generated, below=below)
    entry = sample_entry(
        prompt_token_ids=ids[:prompt],
        generation_token_ids=ids[prompt:],
        generation_log_probs=[-0.1] * generated,
    )
    assert exact_dump(round_trip(entry)) == exact_dump(entry)


@given(fields=entry_fields())
def test_what_is_read_back_as_arrays_holds_the_same_content(fields: dict[str, Any]) -> None:
    entry = TokenEntry(**fields)
    encoded = encode(entry)
    back = decode(encoded.record, encoded.seal, of=encoded, arrays=True)
    ids = entry.prompt_token_ids + entry.generation_token_ids
    expected = np.int64 if max(ids, default=0) >= 2**31 else np.int32
    assert back.prompt_token_ids.dtype == back.generation_token_ids.dtype == expected
    assert back.generation_log_probs.dtype in (np.float32, np.float64)
    assert stored(back) == stored(entry)


@pytest.mark.parametrize("text", ["", "é", "日本語", "\x00", "\u2028", "𝄞", "�"])
def test_text_of_any_script_survives(text: str) -> None:
    entry = sample_entry(output_items=[{text: text}], model=text, note={text: [text]})
    assert exact_dump(round_trip(entry)) == exact_dump(entry)


@pytest.mark.parametrize("name", ["_private", "copy", "v", "model_dump", "json", "__class__", "é"])
def test_an_extra_of_any_name_survives(name: str) -> None:
    extra: dict[str, Any] = {name: {"kept": [1, 1.0, True, None]}}
    entry = sample_entry(**extra)
    assert exact_dump(round_trip(entry)) == exact_dump(entry)


# Values that are left out

OMITTED: dict[str, Any] = {
    "schema_version": 1,
    "model": "",
    "output_items": [],
    "token_item_index": None,
    "response_id": None,
    "parent_call_id": None,
    "cum_len": None,
    "digest": None,
    "parent_resolution": None,
    "continuation_fingerprint": "",
    "continuation_context_len": 0,
    "continuation_context_digest": "",
    "parent_resolution_reason": "",
    "fingerprint_version": None,
    "prompt_is_delta": False,
    "prefix_requested": False,
    "prefix_supplied": False,
}
"""Part of the format: a change here makes stored records unreadable, or other records."""

RESOLVED: dict[str, Any] = {"parent_resolution": "resolved", "parent_call_id": "parent"}
OTHER_VALUES: list[dict[str, Any]] = [
    *({name: "other"} for name, value in OMITTED.items() if value == ""),
    *({name: number} for name in ("cum_len", "fingerprint_version") for number in (0, 1, -1, 2**40)),
    *({"continuation_context_len": number} for number in (1, -1, 2**40)),
    *({name: text} for name in ("response_id", "parent_call_id", "digest") for text in ("", "other")),
    *({"prefix_requested": True}, {"prefix_supplied": True}),
    *({"parent_resolution": "root"}, {"parent_resolution": "unresolved"}, RESOLVED),
    RESOLVED | {"prompt_is_delta": True},
    *({"output_items": [{}]}, {"output_items": [{}], "token_item_index": 0}),
]
BARE: dict[str, Any] = {
    "rollout_id": "rollout",
    "model_call_id": "call",
    "prompt_token_ids": [1],
    "generation_token_ids": [2],
    "generation_log_probs": [-0.5],
}
"""What every entry must have; all other fields are at their defaults."""


def stored_fields(entry: Any) -> dict[str, Any]:
    fields: dict[str, Any] = msgpack.unpackb(encode(entry).record)["e"]
    return fields


def test_what_is_left_out_is_as_the_format_says_and_a_default_of_the_entry() -> None:
    assert exact(small_fields.OMITTED_VALUES) == exact(OMITTED)
    bare = TokenEntry(**BARE).model_dump(mode="json")
    assert exact({name: bare[name] for name in OMITTED}) == exact(OMITTED)


@pytest.mark.parametrize("written_as", ENTRY_CLASSES)
@pytest.mark.parametrize("read_as", ENTRY_CLASSES)
def test_an_entry_of_defaults_stores_its_time_only_and_comes_back_exactly(
    written_as: Any, read_as: Any
) -> None:
    entry = written_as(**BARE)
    assert stored_fields(entry) == {"created_at": 0.0}
    assert exact_dump(round_trip(entry, read_as)) == exact_dump(entry)


@pytest.mark.parametrize("written_as", ENTRY_CLASSES)
@pytest.mark.parametrize("read_as", ENTRY_CLASSES)
@pytest.mark.parametrize("fields", OTHER_VALUES, ids=repr)
def test_a_field_with_another_value_is_stored_and_comes_back_exactly(
    written_as: Any, read_as: Any, fields: dict[str, Any]
) -> None:
    entry = written_as(**BARE, **fields)
    assert stored_fields(entry) == {"created_at": 0.0, **fields}
    back = round_trip(entry, read_as)
    assert exact_dump(back) == exact_dump(entry)
    assert digest_of(entry) != digest_of(written_as(**BARE))


def test_every_field_that_may_be_left_out_was_tried_with_another_value() -> None:
    tried = {name for fields in OTHER_VALUES for name in fields}
    assert tried == set(OMITTED) - {"schema_version"}, "schema_version has one value so far"


@given(fields=st.dictionaries(st.sampled_from(sorted(OMITTED)), st.just(None)))
def test_a_default_that_is_given_is_the_same_content_as_one_that_is_not(fields: dict[str, Any]) -> None:
    given_ones = {name: OMITTED[name] for name in fields}
    assert stored(TokenEntry(**BARE, **given_ones)) == stored(TokenEntry(**BARE))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("prompt_is_delta", 0), ("prefix_requested", 0), ("prefix_supplied", 0.0), ("prefix_supplied", 0)),
        *(("schema_version", True), ("schema_version", 1.0), ("output_items", ())),
        *(("continuation_context_len", False), ("continuation_context_len", -0.0)),
    ],
)
def test_what_is_assigned_and_read_back_as_a_default_is_that_default(name: str, value: Any) -> None:
    entry = TokenEntry(**BARE)
    setattr(entry, name, value)
    assert exact_dump(round_trip(entry)) == exact_dump(TokenEntry(**BARE))
    assert stored(entry) == stored(TokenEntry(**BARE))


@pytest.mark.parametrize("created_at", [0, 0.0, -0.0, 5e-324])
def test_a_time_of_nearly_nothing_is_stored_with_its_sign(created_at: float) -> None:
    entry = TokenEntry(**BARE, created_at=created_at)
    assert exact(stored_fields(entry)) == exact({"created_at": float(created_at)})
    assert exact(round_trip(entry).created_at) == exact(float(created_at))
    assigned = TokenEntry(**BARE)
    assigned.created_at = created_at
    assert exact(round_trip(assigned).created_at) == exact(float(created_at))
    assert stored(assigned) == stored(entry)


@pytest.mark.parametrize("value", [None, "", [], {}, 0, 0.0, -0.0, False, 1, True], ids=repr)
@pytest.mark.parametrize("name", ["", " ", "e", "note", "Model", "digest ", "rollout", "schema_version_"])
def test_an_extra_is_stored_whatever_its_value(name: str, value: Any) -> None:
    extra: dict[str, Any] = {name: value}
    entry = TokenEntry(**BARE, **extra)
    assert exact(stored_fields(entry)) == exact({"created_at": 0.0, **extra})
    assert exact_dump(round_trip(entry)) == exact_dump(entry)
    assert digest_of(entry) != digest_of(TokenEntry(**BARE))


def test_no_record_repeats_what_its_name_says() -> None:
    record = encode(sample_entry("some-rollout", "some-call")).record
    assert b"some-rollout" not in record
    assert b"some-call" not in record


class OpenEntry(TokenEntry):
    """Takes output items as they come."""

    output_items: Any = None


@pytest.mark.parametrize("entry_type", [*ENTRY_CLASSES, OpenEntry])
def test_entries_with_the_same_value_left_out_share_nothing(
    entry_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_fields, "OMITTED_VALUES", deepcopy(small_fields.OMITTED_VALUES))
    first, second = (round_trip(TokenEntry(**BARE), entry_type) for _ in range(2))
    first.output_items.append({"changed": True})
    assert second.output_items == []
    assert exact_dump(round_trip(TokenEntry(**BARE))) == exact_dump(TokenEntry(**BARE))


@pytest.mark.parametrize(
    "more",
    [
        *({name: value} for name, value in OMITTED.items()),
        *({"rollout_id": "rollout"}, {"model_call_id": "call"}),
        *({"rollout_id": "other"}, {"model_call_id": "other"}, {"model": "other"}, {"prefix_supplied": True}),
    ],
    ids=repr,
)
def test_a_field_added_to_a_stored_record_is_never_an_entry(more: dict[str, Any]) -> None:
    encoded = encode(TokenEntry(**BARE))
    fields = msgpack.unpackb(encoded.record)
    with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
        decode(msgpack.packb(fields | {"e": fields["e"] | more}), encoded.seal, of=encoded)


@pytest.mark.parametrize("name", ["created_at", "model", "output_items", "token_item_index", "response_id"])
def test_a_field_taken_from_a_stored_record_is_never_an_entry(name: str) -> None:
    encoded = encode(sample_entry())
    fields = msgpack.unpackb(encoded.record)
    left = {other: value for other, value in fields["e"].items() if other != name}
    assert left != fields["e"]
    with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
        decode(msgpack.packb(fields | {"e": left}), encoded.seal, of=encoded)


# The same content, whatever carries it


@pytest.mark.parametrize(
    "carrier",
    [tuple, np.array, lambda ids: np.array(ids, np.uint64), lambda ids: np.array(ids, ">i4")],
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


@pytest.mark.skipif(GYM_ENTRY is None, reason="needs NeMo Gym")
@given(fields=entry_fields())
def test_gyms_entry_and_ours_give_the_same_bytes(fields: dict[str, Any]) -> None:
    assert stored(GYM_ENTRY(**fields)) == stored(TokenEntry(**fields))


@given(fields=entry_fields())
def test_lists_and_arrays_give_the_same_bytes(fields: dict[str, Any]) -> None:
    entry = TokenEntry(**fields)
    try:
        carried = as_numpy(entry)
    except (ValueError, OverflowError):
        assume(False)  # ragged experts are no array
    if isinstance(carried.routed_experts, np.ndarray):
        assume(exact(carried.routed_experts.tolist()) == exact(entry.routed_experts))
    assert stored(carried) == stored(entry)


@given(ids=long_ids, earlier=st.lists(long_ids, max_size=2), keep=st.integers(0, 600))
def test_earlier_sequences_change_nothing(ids: list[int], earlier: list[list[int]], keep: int) -> None:
    entry = sample_entry(prompt_token_ids=ids)
    known = [
        encode(sample_entry(prompt_token_ids=other)).sequence for other in [*earlier, ids[:keep], ids * 2]
    ]
    encoded = codec.encode(entry, max_record_bytes=NO_LIMIT, earlier=known)
    assert (encoded.seal, encoded.record, encoded.sequence.blocks_from(0)) == stored(entry)


@pytest.mark.parametrize("nested", [False, True])
def test_the_order_of_dict_keys_does_not_matter(nested: bool) -> None:
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    if nested:
        assert digest_with(output_items=[one]) == digest_with(output_items=[other])
        assert digest_with(routed_experts=one) == digest_with(routed_experts=other)
    else:
        digests = {
            digest_of(TokenEntry(**fields))
            for fields in (SMALL | {"x": 1, "y": 2}, {"y": 2, "x": 1} | dict(reversed(SMALL.items())))
        }
        assert len(digests) == 1


def test_an_assigned_value_is_the_same_content_as_a_validated_one() -> None:
    assigned = sample_entry()
    assigned.created_at = 5
    assert stored(assigned) == stored(sample_entry(created_at=5.0))


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
    digests = {digest_of(sample_entry(extra=value)) for value in (one, other)}
    assert len(digests) == 2
    experts = {digest_with(routed_experts={"value": value}) for value in (one, other)}
    assert len(experts) == 2


@given(one=entry_fields(), other=entry_fields())
def test_two_entries_have_one_digest_exactly_if_they_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = TokenEntry(**one), TokenEntry(**other)
    same = exact_dump(first) == exact_dump(second)
    assert (digest_of(first) == digest_of(second)) == same


# Size


@pytest.mark.parametrize(
    ("largest", "bytes_per_id"),
    [
        *((255, 1), (256, 2), (65_535, 2), (65_536, 3)),
        *((2**24 - 1, 3), (2**24, 4), (2**32 - 1, 4), (2**32, 8)),
    ],
)
@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids"])
@pytest.mark.parametrize("count", [250, 1_000])
def test_an_id_takes_only_the_bytes_that_the_largest_needs(
    field: str, largest: int, bytes_per_id: int, count: int
) -> None:
    arrays: dict[str, Any] = {
        "prompt_token_ids": [],
        "generation_token_ids": [],
        field: [largest] * count,
    }
    arrays["generation_log_probs"] = [-0.5] * len(arrays["generation_token_ids"])
    without = sample_entry(prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[])
    grown = stored_bytes(sample_entry(**arrays)) - stored_bytes(without)
    log_probs = 4 * len(arrays["generation_log_probs"])
    assert 0 <= grown - log_probs - bytes_per_id * count <= 8


def test_a_large_id_makes_only_its_own_block_wider() -> None:
    narrow, wide = [1] * 1_024, [2**40, *[1] * 1_023]
    grown = stored_bytes(sample_entry(prompt_token_ids=wide)) - stored_bytes(
        sample_entry(prompt_token_ids=narrow)
    )
    assert grown == 7 * 256


@pytest.mark.parametrize(("value", "bytes_each"), [(-0.5, 4), (-0.1, 8)])
def test_a_log_probability_takes_four_bytes_if_they_hold_it(value: float, bytes_each: int) -> None:
    few, many = (
        stored_bytes(
            sample_entry(prompt_token_ids=[], generation_token_ids=[1] * n, generation_log_probs=[value] * n)
        )
        for n in (1_024, 2_048)
    )
    assert many - few == (bytes_each + 1) * 1_024


@pytest.mark.parametrize("turns", [1, 20])
def test_a_record_does_not_grow_with_its_prompt(turns: int) -> None:
    record = encode(sample_entry(prompt_token_ids=random_ids(1_024 * turns))).record
    assert len(record) - len(encode(sample_entry(prompt_token_ids=[])).record) <= 4


@pytest.mark.parametrize("fields", [{}, LONG], ids=["short", "with blocks"])
def test_a_record_above_the_limit_is_refused_and_one_at_the_limit_is_not(fields: dict[str, Any]) -> None:
    encoded = encode(sample_entry(**fields))
    size = len(encoded.record) + 4 * len(encoded.sequence.ids)
    assert codec.encode(sample_entry(**fields), max_record_bytes=size).record == encoded.record
    with pytest.raises(RecordTooLargeError, match=rf"{size} bytes.*{size - 1}.*'call' of rollout rollout"):
        codec.encode(sample_entry(**fields), max_record_bytes=size - 1)


# What no reader could load is refused before it is sent


@pytest.mark.parametrize("field", ["prompt_token_ids", "generation_token_ids"])
def test_a_list_that_changes_while_it_is_packed_is_refused(field: str) -> None:
    ids: list[Any] = [1, 2, 3]

    class Shrinking:
        def __index__(self) -> int:
            ids.clear()
            return 1

    ids.append(Shrinking())
    with pytest.raises(InvalidRecordError, match="'call' of rollout rollout"):
        encode(sample_entry().model_copy(update={field: ids}))


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
        ("prompt_token_ids", deque([1, 2])),
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
    ids=lambda value: steady_repr(value)[:40],
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
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from("vectplx"), inner, max_size=6)
    ),
)


def resealed(encoded: codec.EncodedRecord, record: bytes) -> bytes:
    """A seal that fits other bytes, as only this package can make it."""
    digest = encoded.seal[: codec.DIGEST_BYTES]
    return codec.sealed(encoded.rollout_id, encoded.model_call_id, digest, record)


def error_or_none(record: bytes, seal: bytes, encoded: codec.EncodedRecord) -> Any:
    """What the error is about that these bytes are read with; None for an entry, whatever it holds."""
    try:
        decode(record, seal, of=encoded)
    except CorruptRecordError as error:
        return error.rollout_id, error.model_call_id
    return None


def is_harmless_or_noticed(record: bytes, encoded: codec.EncodedRecord, original: Any) -> bool:
    try:
        back = decode(record, encoded.seal, of=encoded)
    except CorruptRecordError as error:
        return (error.rollout_id, error.model_call_id) == ("rollout", "call")
    return bool(exact_dump(back) == original)


@pytest.mark.parametrize(
    "experts",
    [None, [[[1, 2]], [[3, 4]]], "nrlre1:int8:2x1x2:AQIDBA==", "text", [[1], [2, 3]], {"1": None}],
    ids=["none", "nested", "route", "text", "ragged", "dict"],
)
@pytest.mark.parametrize("fields", [{}, LONG], ids=["short", "with blocks"])
def test_no_single_flipped_bit_becomes_another_entry(experts: Any, fields: dict[str, Any]) -> None:
    entry = sample_entry(routed_experts=experts, extra={"1": 1.5, "": True}, **fields)
    encoded, original = encode(entry), exact_dump(entry)
    for bit in range(8 * len(encoded.record)):
        flipped = bytearray(encoded.record)
        flipped[bit // 8] ^= 1 << bit % 8
        assert is_harmless_or_noticed(bytes(flipped), encoded, original), f"bit {bit}"


@pytest.mark.parametrize("fields", [{}, LONG], ids=["short", "with blocks"])
def test_no_truncation_becomes_an_entry(fields: dict[str, Any]) -> None:
    encoded = encode(sample_entry(**fields))
    for size in range(len(encoded.record)):
        with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
            decode(encoded.record[:size], encoded.seal, of=encoded)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 47, 49, 64, 80, 96])
def test_no_truncated_or_lengthened_seal_fits(size: int) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError):
        decode(encoded.record, (encoded.seal * 2)[:size], of=encoded)


def test_no_flipped_bit_of_the_seal_fits() -> None:
    encoded = encode(sample_entry())
    assert len(encoded.seal) == codec.DIGEST_BYTES + 16
    for bit in range(8 * len(encoded.seal)):
        flipped = bytearray(encoded.seal)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecordError):
            decode(encoded.record, bytes(flipped), of=encoded)


@given(garbage=st.binary(max_size=200))
def test_garbage_is_never_an_entry(garbage: bytes) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError):
        decode(garbage, encoded.seal, of=encoded)


@given(value=other_shapes)
def test_well_formed_msgpack_of_another_shape_is_never_an_entry(value: Any) -> None:
    encoded = encode(sample_entry())
    with pytest.raises(CorruptRecordError):
        decode(msgpack.packb(value), encoded.seal, of=encoded)


@pytest.mark.parametrize("part", ["v", "e", "c", "t", "p", "l", "x"])
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
        ["u3", b"odd bytes!"],
        ["u5", b""],
        -1,
        0,
        2**63,
        ROOT[1:],
        b"\xff" * NAME_BYTES,
        "\0" * NAME_BYTES,
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
        decode(msgpack.packb(fields), encoded.seal, of=encoded)


@pytest.mark.parametrize("part", ["v", "e", "c", "t", "p", "l", "x"])
@given(value=other_shapes | st.just({}) | st.just([b"u1", b""]) | st.just(["u1", "text"]) | st.just([]))
def test_a_part_of_another_shape_under_a_fitting_seal_is_an_error_of_ours_or_read(
    part: str, value: Any
) -> None:
    """The seal vouches for what this package wrote; another program may have sealed anything."""
    encoded = encode(sample_entry(**LONG))
    forged = msgpack.packb(msgpack.unpackb(encoded.record) | {part: value})
    assert error_or_none(forged, resealed(encoded, forged), encoded) in (None, ("rollout", "call"))


@given(value=other_shapes)
def test_msgpack_of_any_shape_under_a_fitting_seal_is_an_error_of_ours(value: Any) -> None:
    encoded = encode(sample_entry())
    forged = msgpack.packb(value)
    with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
        decode(forged, resealed(encoded, forged), of=encoded)


@pytest.mark.parametrize("value", [0, False, "", b"", [], {}, [b""], [None]], ids=repr)
def test_something_empty_in_place_of_no_experts_is_never_an_entry(value: Any) -> None:
    encoded = encode(sample_entry(routed_experts=None))
    fields = msgpack.unpackb(encoded.record) | {"x": value}
    with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
        decode(msgpack.packb(fields), encoded.seal, of=encoded)


@pytest.mark.parametrize("value", [0, False, "", b"", [], {}, [None]], ids=repr)
def test_something_empty_in_place_of_no_experts_does_not_match_the_digest(value: Any) -> None:
    encoded = encode(sample_entry(routed_experts=None))
    forged = msgpack.packb(msgpack.unpackb(encoded.record) | {"x": value})
    with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
        codec.parse(forged, encoded.seal, rollout_id="rollout", model_call_id="call")


@pytest.mark.parametrize(
    "others", [LONG["prompt_token_ids"][:256], random_ids(600, seed=1)], ids=["parent", "other"]
)
def test_a_record_that_points_to_another_stored_block_is_never_an_entry(others: list[int]) -> None:
    encoded = encode(sample_entry(**LONG))
    other = encode(sample_entry(prompt_token_ids=others)).sequence
    forged = msgpack.packb(msgpack.unpackb(encoded.record) | {"c": other.end})
    with pytest.raises(CorruptRecordError, match="'call' of rollout rollout"):
        decode(forged, encoded.seal, of=encoded, beside=(other,))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_record_whose_blocks_are_not_all_there_is_never_an_entry(missing: int) -> None:
    encoded = encode(sample_entry(**LONG))
    about: Any = {"rollout_id": "rollout", "model_call_id": "call"}
    parsed = codec.parse(encoded.record, encoded.seal, **about)
    tree = BlockTree()
    tree.add_blocks(encoded.sequence.blocks_from(0)[:missing])
    with pytest.raises(CorruptRecordError, match=r"token blocks.*missing.*'call' of rollout rollout"):
        codec.build(parsed, tree, parts_of(encoded), TokenEntry)


@pytest.mark.parametrize("arrays", [False, True])
def test_a_record_is_never_built_from_another_prefix(*, arrays: bool) -> None:
    encoded = encode(sample_entry(**LONG))
    other = encode(sample_entry(prompt_token_ids=random_ids(600, seed=1)))
    about: Any = {"rollout_id": "rollout", "model_call_id": "call"}
    parsed = codec.parse(encoded.record, encoded.seal, **about)
    with pytest.raises(CorruptRecordError):
        codec.build(parsed, tree_of(other.sequence), parts_of(encoded), TokenEntry, arrays=arrays)


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
        codec.parse(encoded.record, encoded.seal, rollout_id=rollout_id, model_call_id=model_call_id)


def test_a_record_of_a_newer_schema_asks_to_upgrade_the_reader() -> None:
    encoded = encode(sample_entry())
    fields = msgpack.unpackb(encoded.record)
    fields["e"]["schema_version"] = 2
    with pytest.raises(UnsupportedFormatError, match=r"schema_version 2.*upgrade the reader"):
        decode(record := msgpack.packb(fields), resealed(encoded, record), of=encoded)


@given(experts=nested_experts | ragged_experts, ids=st.lists(token_ids, max_size=4) | long_ids)
def test_what_was_read_back_encodes_to_the_same_bytes(experts: Any, ids: list[int]) -> None:
    entry = sample_entry(routed_experts=experts, prompt_token_ids=ids)
    assert stored(round_trip(entry)) == stored(entry)


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
        ({"routed_experts": None, "prompt_token_ids": [0] * taking.LARGE_TOKENS}, True),
        ({"routed_experts": None, "prompt_token_ids": None}, False),
    ],
    ids=["experts", "small", "long", "invalid"],
)
def test_only_large_records_go_to_a_thread(changes: dict[str, Any], large: bool) -> None:
    assert taking.take(sample_entry().model_copy(update=changes)).is_large is large


def test_arrays_are_copied_for_another_thread() -> None:
    arrays = {"routed_experts": np.arange(6).reshape(1, 2, 3), "prompt_token_ids": np.arange(9)}
    entry = sample_entry().model_copy(update=arrays)
    taken, copied = taking.take(entry), taking.take(entry).copied()
    assert not np.shares_memory(taken.routed_experts, copied.routed_experts)
    assert not np.shares_memory(taken.prompt_token_ids, copied.prompt_token_ids)
