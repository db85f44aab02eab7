"""What pydantic refused, in plain words. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_RULES = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "path_type": "must be the path of a directory",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "must be a whole number"
    ),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("string_type", "string_unicode"), "must be text"),
    **dict.fromkeys(("model_type", "dict_type"), "must be a mapping"),
}
"""By pydantic's type of the error."""

_LONGEST_BITS = 64


def broken_rule(error: ValidationError) -> str:
    """Field and rule of the first thing that was refused, without the value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    said = first["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if where else said


def rule_for_setting(first: Any) -> str:
    """What the value must be; ``first`` is one of ``ValidationError.errors()``, with its context."""
    context = first.get("ctx", {})
    if first["type"] == "value_error":
        return str(context["error"])
    rule = _RULES.get(first["type"])
    if rule is None:
        return f"must be something else ({first['msg']})"
    return rule.format_map({name: _number(bound) for name, bound in context.items()})


def shown(value: Any, *, text: bool) -> str:
    """The value, if it can be no secret: numbers can be shown, and with ``text`` text too, but no URL.

    Else of what type it is.
    """
    is_short = (
        value is None
        or isinstance(value, bool | float)
        or (isinstance(value, int) and value.bit_length() <= _LONGEST_BITS)
    )
    if is_short or (text and isinstance(value, str) and not may_be_url(value)):
        return repr(value)
    return "text" if isinstance(value, str) else f"of type {type(value).__name__}"


def may_be_url(text: str) -> bool:
    """Whether it may be a URL that went astray, in which a password may be."""
    return "://" in text


def _number(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound
