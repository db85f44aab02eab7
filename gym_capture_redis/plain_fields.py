"""Small fields that are their own JSON form, as those of nearly every entry are: told without pydantic.

What holds what is declared, in plain types, is dumped as it is and read back as it is. Anything else is left
to pydantic: the only rule here is when that has nothing to do. No I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from math import isfinite
from typing import Any, get_args

from pydantic import BaseModel

from gym_capture_redis.records import TokenEntry, check_entry
from gym_capture_redis.small_fields import OMITTED_VALUES, PACKED_FIELDS

_MOST_CONTAINERS = 200
"""So few are not nested too deeply for pydantic, and come to an end, also where one holds itself."""

_LONGEST_BITS = 63
_NOT_OMITTED = object()
_NO_RULE = (None, None)
_TEXT, _MAPPING = frozenset((str,)), frozenset((dict,))


def _plain_kinds(annotation: Any) -> frozenset[type]:
    """The types in which what is declared so is dumped as it is; none where that is not known."""
    if annotation in (list[dict], list[dict[Any, Any]]):  # type: ignore[type-arg] # as Gym has it
        return frozenset((list,))
    kinds = get_args(annotation) or (annotation,)
    if not all(isinstance(kind, type) for kind in kinds):
        return frozenset()
    return frozenset(str if issubclass(kind, StrEnum) else kind for kind in kinds)


_KINDS = {
    name: _plain_kinds(field.annotation)
    for name, field in TokenEntry.model_fields.items()
    if name not in PACKED_FIELDS
}
"""The types in which a field is read back as it is."""

_RULES = {name: (OMITTED_VALUES.get(name, _NOT_OMITTED), kinds) for name, kinds in _KINDS.items()}


def plain_fields(entry: BaseModel) -> dict[str, Any] | None:
    """The small fields as they are, if dumping them would give the same and reading them back too, else None.

    Most of those that records leave out are left out. What is in the others is the entry's own, not copied.
    """
    values, entry_type = entry.__dict__, type(entry)
    is_built = entry_type.__pydantic_complete__  # before, nothing is known for good
    if getattr(entry, "__pydantic_extra__", None) or not is_built:
        return None
    if values.keys() != _fields_dumped_as_they_are(entry_type):
        return None
    fields: dict[str, Any] = {}
    for name, value in values.items():
        omitted, kinds = _RULES.get(name, _NO_RULE)
        if kinds is None or value is omitted:
            continue
        plain = value.value if name == "parent_resolution" and isinstance(value, StrEnum) else value
        if type(plain) not in kinds:
            return None
        fields[name] = plain
    if not _MAPPING.issuperset(map(type, fields.get("output_items", ()))):
        return None
    try:
        check_entry(entry)  # type: ignore[arg-type] # it has the same fields
    except (ValueError, TypeError):
        return None
    return fields


def plain_text_length(fields: dict[str, Any]) -> int | None:
    """Characters of all text in the fields, or None if anything in them is not its own JSON form."""
    texts: list[str] = []
    containers: list[Any] = [fields]
    for container in containers:  # which grow meanwhile
        values: Iterable[Any] = container
        if type(container) is dict:
            if not _TEXT.issuperset(map(type, container)):
                return None
            texts += container
            values = container.values()
        for value in values:
            kind = type(value)
            if kind is str:
                texts.append(value)
            elif kind is dict or kind is list:
                containers.append(value)
            elif value is not None and not _is_plain_number(value, kind):
                return None
        if len(containers) > _MOST_CONTAINERS:
            return None
    text = "".join(texts)
    return len(text) if text.isascii() or _is_utf8(text) else None


def _is_plain_number(value: Any, kind: type) -> bool:
    if kind is int:
        return bool(value.bit_length() <= _LONGEST_BITS)
    return kind is bool or (kind is float and isfinite(value))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@cache
def _fields_dumped_as_they_are(entry_type: type[BaseModel]) -> frozenset[str] | None:
    """All fields of a class that is built, if it declares ours and no others and dumps them as they are."""
    names = frozenset(entry_type.model_fields)
    if entry_type is TokenEntry:  # whose only serialiser is about other types
        return names
    declared = {
        name: _plain_kinds(field.annotation)
        for name, field in entry_type.model_fields.items()
        if name not in PACKED_FIELDS
    }
    dumps_as_usual = entry_type.model_dump is BaseModel.model_dump
    if declared == _KINDS and dumps_as_usual and not _serialises(entry_type.__pydantic_core_schema__):
        return names
    return None  # no set of fields: an entry may hold none


def _serialises(schema: Any) -> bool:
    """Whether a schema of pydantic says anything of its own about dumping."""
    if isinstance(schema, dict):
        return bool(schema.get("computed_fields")) or any(
            str(name).startswith("serialization") or _serialises(value) for name, value in schema.items()
        )
    return isinstance(schema, list | tuple) and any(map(_serialises, schema))
