"""An entry that is taken without pydantic is taken, or refused, exactly as pydantic would have it."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    ConfigDict,
    Field,
    PlainSerializer,
    computed_field,
    create_model,
    field_serializer,
    model_serializer,
)
from support.sample_entries import entry_fields, exact, json_values, sample_entry
from typing_extensions import TypedDict  # pydantic asks for it below Python 3.12

from gym_capture_redis import codec, gym_compat, taking
from gym_capture_redis.errors import InvalidRecordError
from gym_capture_redis.plain_fields import plain_fields, plain_text_length
from gym_capture_redis.records import ParentResolutionStatus, TokenEntry
from gym_capture_redis.small_fields import PACKED_FIELDS

ENTRY_CLASSES: list[Any] = [
    entry_class
    for entry_class in (TokenEntry, gym_compat.gym_attribute("records", "TokenEntry"))
    if entry_class is not None  # where there is no NeMo Gym, ours is all that there is
]
UnserialisedEntry: Any = create_model(
    "UnserialisedEntry",
    __config__=ConfigDict(extra="allow", protected_namespaces=()),
    **{name: (field.annotation, field) for name, field in TokenEntry.model_fields.items()},  # type: ignore[call-overload]
)
"""Like ours, but for the one serialiser."""

SMALL_FIELDS = [name for name in TokenEntry.model_fields if name not in PACKED_FIELDS]


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class OddStatus(StrEnum):
    ROOT = "root"
    SIDEWAYS = "sideways"


class Number(IntEnum):
    ONE = 1


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def holding_itself() -> list[Any]:
    inner: list[Any] = []
    inner += [inner, inner]
    return inner


ODD_VALUES: dict[str, Any] = {
    "nothing": None,
    "true": True,
    "zero": 0,
    "one": 1,
    "minus-one": -1,
    "too-long": 2**63,
    "far-too-long": -(2**70),
    "float": 1.0,
    "minus-zero": -0.0,
    "nan": float("nan"),
    "infinity": float("-inf"),
    "text": "text",
    "status": "resolved",
    "not-utf-8": "a\ud800",
    "beyond-ascii": "é\U0001f600",
    "text-of-a-kind": Text("root"),
    "number-of-a-kind": Whole(1),
    "our-status": ParentResolutionStatus.ROOT,
    "other-status": OddStatus.ROOT,
    "no-status": OddStatus.SIDEWAYS,
    "enum": Number.ONE,
    "bytes": b"bytes",
    "broken-bytes": b"\xff",
    "tuple": (1, 2),
    "set": {1},
    "decimal": Decimal(1),
    "date": dt.date(2020, 1, 1),
    "object": object(),
    "class": int,
    "dots": ...,
    "no-list": [],
    "entry": sample_entry(),
    "list": [1],
    "ordered": OrderedDict(a=1),
    "number-as-key": {1: 1},
    "nothing-as-key": {None: 1},
    "enum-as-key": {OddStatus.ROOT: 1},
    "not-utf-8-as-key": {"\ud800": 1},
    "very-deep": nested(300),
    "deep": nested(190),
    "deeper-than-pydantic": nested(254),
    "holding-itself": holding_itself(),
    "many": [{"a": [1]} for _ in range(500)],
}

odd_values = st.sampled_from(list(ODD_VALUES.values()))
output_values = (
    odd_values
    | json_values
    | st.lists(st.dictionaries(st.sampled_from("ab"), odd_values | json_values, max_size=2), max_size=2)
)


def outcome(entry: Any) -> Any:
    """What is stored for an entry, or what is said of it."""
    try:
        encoded = codec.encode(entry, max_record_bytes=2**30)
    except InvalidRecordError as error:
        return type(error), str(error), error.rollout_id, error.model_call_id
    taken = taking.take(entry)
    fields = [(name, exact(value)) for name, value in taken.small_fields.items()]
    return exact(list(taken.subject())), fields, encoded.record, encoded.seal


def outcome_by_pydantic(entry: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taking, "plain_fields", lambda _: None)
        return outcome(entry)


def is_plain(entry: Any) -> bool:
    fields = plain_fields(entry)
    return fields is not None and plain_text_length(fields) is not None


@given(entry_fields(), st.sampled_from(ENTRY_CLASSES))
def test_every_valid_entry_is_taken_as_pydantic_takes_it(fields: dict[str, Any], entry_class: Any) -> None:
    entry = entry_class.model_validate(fields)
    assert outcome(entry) == outcome_by_pydantic(entry)


@given(
    st.sampled_from(ENTRY_CLASSES),
    st.dictionaries(st.sampled_from([*SMALL_FIELDS, "output_items"]), output_values, max_size=3),
)
def test_every_changed_entry_is_taken_or_refused_as_pydantic_does(
    entry_class: Any, changes: dict[str, Any]
) -> None:
    entry = entry_class.model_validate(sample_entry().__dict__ | {"routed_experts": None})
    for name, value in changes.items():
        setattr(entry, name, value)
    assert outcome(entry) == outcome_by_pydantic(entry)


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
@pytest.mark.parametrize("name", SMALL_FIELDS)
@pytest.mark.parametrize("entry_class", ENTRY_CLASSES)
def test_each_odd_value_anywhere_is_taken_or_refused_as_pydantic_does(
    entry_class: Any, name: str, value: Any
) -> None:
    entry = entry_class.model_validate(sample_entry().__dict__)
    for put in (value, [value], [{"key": value}], [{"key": [value]}]):
        setattr(entry, name, put)
        assert outcome(entry) == outcome_by_pydantic(entry)


@pytest.mark.parametrize("entry_class", ENTRY_CLASSES)
def test_ordinary_entries_need_no_pydantic(entry_class: Any) -> None:
    lineage: dict[str, Any] = {"parent_resolution": "resolved", "parent_call_id": "0", "cum_len": 5}
    assert is_plain(entry_class.model_validate(sample_entry().__dict__ | lineage))


def test_a_field_that_is_missing_is_refused_as_pydantic_does() -> None:
    for name in SMALL_FIELDS:
        entry = sample_entry()
        del entry.__dict__[name]
        assert not is_plain(entry)


@pytest.mark.parametrize("entry_class", [create_model("Nothing"), type("Sub", (TokenEntry,), {})])
def test_what_holds_no_fields_at_all_is_refused_as_no_entry(entry_class: Any) -> None:
    entry = entry_class.model_construct()
    entry.__dict__.clear()
    assert plain_fields(entry) is None
    with pytest.raises(InvalidRecordError, match="lacks prompt_token_ids"):
        taking.take(entry)


def test_what_lies_beside_the_fields_is_left_to_pydantic() -> None:
    entry = sample_entry()
    entry.__dict__["beside"] = "value"
    assert not is_plain(entry)
    assert outcome(entry) == outcome_by_pydantic(entry)


class NewerEntry(UnserialisedEntry):  # type: ignore[misc]
    more: Any = 1


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_a_field_that_we_do_not_know_is_left_to_pydantic(value: Any) -> None:
    entry = NewerEntry.model_validate(sample_entry().__dict__)
    entry.more = value
    assert not is_plain(entry)
    assert outcome(entry) == outcome_by_pydantic(entry)


def test_rules_between_fields_hold() -> None:
    for changes in (
        {"token_item_index": 1},
        {"parent_resolution": "root", "parent_call_id": "parent"},
        {"parent_resolution": "resolved"},
        {"prompt_is_delta": True},
        {"schema_version": 2},
        {"generation_token_ids": [1]},
        {"generation_token_ids": 1},
    ):
        entry = sample_entry().model_copy(update=changes)
        assert not is_plain(entry)
        with pytest.raises(InvalidRecordError):
            codec.encode(entry, max_record_bytes=2**30)


class ExcludedField(UnserialisedEntry):  # type: ignore[misc]
    secret: str = Field(default="", exclude=True)


class RenamedField(UnserialisedEntry):  # type: ignore[misc]
    other: str = Field(default="", serialization_alias="another")


class ComputedField(UnserialisedEntry):  # type: ignore[misc]
    @computed_field  # type: ignore[prop-decorator]
    @property
    def length(self) -> int:
        return 5


class AnnotatedField(UnserialisedEntry):  # type: ignore[misc]
    model: Annotated[str, PlainSerializer(str.upper)] = ""


class SerialisedField(UnserialisedEntry):  # type: ignore[misc]
    @field_serializer("model")
    def upper(self, value: str) -> str:
        return value.upper()


class SerialisedWhole(UnserialisedEntry):  # type: ignore[misc]
    @model_serializer(mode="wrap")
    def with_more(self, dump: Any) -> Any:
        return {**dump(self), "more": 1}


class DumpedOtherwise(UnserialisedEntry):  # type: ignore[misc]
    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {**super().model_dump(**options), "more": 1}


@pytest.mark.parametrize(
    "entry_class",
    [
        ExcludedField,
        RenamedField,
        ComputedField,
        AnnotatedField,
        SerialisedField,
        SerialisedWhole,
        DumpedOtherwise,
    ],
)
def test_a_class_that_dumps_in_its_own_way_is_left_to_pydantic(entry_class: Any) -> None:
    entry = entry_class.model_validate(sample_entry().__dict__)
    assert not is_plain(entry)
    assert outcome(entry) == outcome_by_pydantic(entry)


class Undeclared(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    a: float


class AnotherType(UnserialisedEntry):  # type: ignore[misc]
    cum_len: float | None = None


class OtherItems(UnserialisedEntry):  # type: ignore[misc]
    output_items: list[dict[str, float]] = Field(default_factory=list)


class TypedItems(UnserialisedEntry):  # type: ignore[misc]
    output_items: list[Undeclared] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("entry_class", "changes"),
    [
        (AnotherType, {"cum_len": 123456789012345678}),
        (AnotherType, {"cum_len": 2**63 - 1}),
        (AnotherType, {"cum_len": True}),
        (OtherItems, {"output_items": [{"a": 1}]}),
        (TypedItems, {"output_items": [{"a": 1, "b": 2}]}),
    ],
)
def test_a_field_that_is_declared_otherwise_is_left_to_pydantic(
    entry_class: Any, changes: dict[str, Any]
) -> None:
    entry = entry_class.model_validate(sample_entry(output_items=[], token_item_index=None).__dict__)
    entry = entry.model_copy(update=changes)
    assert not is_plain(entry)
    assert outcome(entry) == outcome_by_pydantic(entry)


def test_a_class_that_is_built_late_is_taken_as_pydantic_takes_it_before_and_after() -> None:
    class BuiltLate(UnserialisedEntry):  # type: ignore[misc]
        model_config = ConfigDict(defer_build=True)

        @field_serializer("model")
        def upper(self, value: str) -> str:
            return value.upper()

    first = BuiltLate.model_construct(**sample_entry(model="x").__dict__)
    assert not is_plain(first)
    assert outcome(first) == outcome_by_pydantic(first)
    later = BuiltLate.model_validate(sample_entry(model="x").__dict__)
    for entry in (first, later):
        assert taking.take(entry).small_fields["model"] == "X"


def test_what_another_thread_encodes_is_the_callers_no_more() -> None:
    entry = sample_entry()
    copied = taking.take(entry).copied()
    entry.output_items[0]["type"] = "changed"
    assert copied.small_fields["output_items"][0]["type"] == "message"
