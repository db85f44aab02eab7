"""Identifiers are refused before they become keys; what is accepted can never meet another's key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture_redis import keys
from gym_capture_redis.errors import InvalidIdentifierError

alphabet = st.sampled_from("abcXYZ019._-")
names = st.text(alphabet, min_size=1, max_size=12)

NO_IDENTIFIERS = [
    "",
    " ",
    "a b",
    "a/b",
    "a:b",
    "{a}",
    "a}",
    "a\n",
    "\na",
    "a\0",
    "é",
    "²",
    "日",
    None,
    5,
    b"a",
    ["a"],
]


def test_the_key_of_a_rollout_is_one_hash_tag() -> None:
    assert keys.rollout_key("run", "rollout-1") == b"gymcap:{run/rollout-1}"


@given(st.tuples(names, names), st.tuples(names, names))
def test_different_rollouts_have_different_keys(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (keys.rollout_key(*one) == keys.rollout_key(*other)) == (one == other)


@pytest.mark.parametrize("value", NO_IDENTIFIERS)
@pytest.mark.parametrize(
    ("validate", "what"), [(keys.validate_namespace, "namespace"), (keys.validate_rollout_id, "rollout id")]
)
def test_a_name_outside_the_alphabet_is_refused(validate: Any, what: str, value: Any) -> None:
    with pytest.raises(InvalidIdentifierError, match=f"^{what} "):
        validate(value)


@pytest.mark.parametrize(
    ("validate", "longest"),
    [
        (keys.validate_namespace, keys.MAX_NAMESPACE_LENGTH),
        (keys.validate_rollout_id, keys.MAX_ROLLOUT_ID_LENGTH),
    ],
)
def test_a_name_may_be_as_long_as_the_limit_and_no_longer(validate: Any, longest: int) -> None:
    assert validate("a" * longest) == "a" * longest
    with pytest.raises(InvalidIdentifierError, match=f"1 to {longest} ASCII"):
        validate("a" * (longest + 1))


def test_a_url_in_place_of_a_name_is_not_shown() -> None:
    with pytest.raises(InvalidIdentifierError) as raised:
        keys.validate_namespace("redis://:swordfish@server")
    assert "swordfish" not in str(raised.value)


def test_a_refused_name_is_shown_shortened() -> None:
    with pytest.raises(InvalidIdentifierError) as refusal:
        keys.validate_rollout_id("x" * 100_000)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("call", ["c", "é", "a b", "a\0b", "{x}", "r:x", "\n", "c" * keys.MAX_CALL_ID_BYTES])
def test_a_call_id_is_any_text(call: str) -> None:
    assert keys.validate_call_id(call, rollout_id="r") == call


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("", "it is empty"),
        (None, "it is of type NoneType"),
        (5, "it is of type int"),
        (b"c", "it is of type bytes"),
        ("\ud800", "it is not valid UTF-8"),
        ("c" * 1_025, "it has 1025 bytes"),
        ("é" * 513, "it has 1026 bytes"),
    ],
)
def test_a_malformed_call_id_is_refused_with_the_reason(call: Any, why: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=why) as refusal:
        keys.validate_call_id(call, rollout_id="rollout-7")
    assert refusal.value.rollout_id == "rollout-7"
    assert "rollout-7" in str(refusal.value)


def test_only_a_mark_may_speak_of_no_call() -> None:
    assert keys.validate_call_id("", rollout_id="r", allow_empty=True) == ""
    with pytest.raises(InvalidIdentifierError):
        keys.validate_call_id(None, rollout_id="r", allow_empty=True)


@pytest.mark.parametrize("code", ["overloaded", "é", "a b", "c" * keys.MAX_REFUSAL_CODE_BYTES])
def test_a_refusal_code_is_any_text(code: str) -> None:
    assert keys.validate_refusal_code(code, rollout_id="r", model_call_id="c") == code


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", "empty"),
        ("a\0b", "NUL"),
        ("\0", "NUL"),
        ("\ud800", "UTF-8"),
        ("c" * 257, "257 bytes"),
        (None, "NoneType"),
    ],
)
def test_a_malformed_refusal_code_is_refused_with_the_reason(code: Any, why: str) -> None:
    with pytest.raises(InvalidIdentifierError, match=why) as refusal:
        keys.validate_refusal_code(code, rollout_id="r", model_call_id="c")
    assert (refusal.value.rollout_id, refusal.value.model_call_id) == ("r", "c")


def test_the_prefixes_of_fields_are_two_bytes_and_differ() -> None:
    prefixes = [b"i:", b"b:", keys.RECORD, keys.INTENT, keys.FAILURE, keys.REFUSAL, b"s:", b"o:"]
    assert len(set(prefixes)) == len(prefixes)
    assert {len(prefix) for prefix in prefixes} == {2}


@pytest.mark.parametrize("wrong", [None, 5, object()])
def test_ids_that_are_none_at_all_are_refused_in_clear_words(wrong: Any) -> None:
    named = type(wrong).__name__
    with pytest.raises(TypeError, match=f"rollout_ids must be an iterable of ids, not of type {named}"):
        keys.distinct(wrong)


def test_each_id_comes_once_in_order() -> None:
    assert keys.distinct(iter("bab")) == ["b", "a"]
