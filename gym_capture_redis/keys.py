"""The key schema: the one place that knows the name of a key or of a hash field.

A rollout is one hash, ``gymcap:{<namespace>/<rollout_id>}``; the braces keep all that belongs to a
rollout in one cluster slot. The fields are named by prefix (docs/wire-format.md):

=============  =====================================================================
``s``          state: one line of words
``o:<seq>``    what step number ``seq`` wrote: ``<n>:``, the names of the n blocks it brought, and one of
               ``n:<call>`` (an intent), ``r:<call>`` (a record), ``x:<call>`` (a refusal), ``f:<call>``
               (a failure), ``p:`` (a part of a record)
``c:<call>``   the call's row: ``n`` (announced, neither recorded nor refused yet), ``r`` and the record's
               seal, or ``x``, the refusal code, NUL, a digest and the msgpack details
``r:<call>``   record
``b:<name>``   token block, or part of a record, named by 16 bytes
``f:<call>``   failure: ``<unix ms> <code>``, and the ids of marks
=============  =====================================================================

The rows of a capture ledger are a hash of their own, ``gymcap:{<namespace>/<rollout_id>}:ledger``. Its fields
``s``, ``o:<seq>`` and ``f:<call>`` mean the same; ``r:<call>`` is a row, and ``x:<call>`` why a call failed.

What Gym's inference workers stage for a rollout is a hash of the same form, ``gymcap:{...}:staged``, whose
records are others.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from gym_capture_redis.errors import InvalidIdentifierError
from gym_capture_redis.plain_words import may_be_url

RECORD = b"r:"
INTENT = b"n:"
FAILURE = b"f:"
REFUSAL = b"x:"
PART = b"p:"
"""Kinds of steps, in their traces."""

CALL_ROW = b"c:"
"""Beginning of the field of a call's row."""

BLOCK = b"b:"
"""Beginning of the field of a token block or a part."""

ANNOUNCED = b"n"
RECORDED = b"r"
REFUSED = b"x"
"""Beginnings of a call's row."""

MAX_ROLLOUT_ID_LENGTH = 255
MAX_CALL_ID_BYTES = 1024
MAX_NAMESPACE_LENGTH = 64
MAX_REFUSAL_CODE_BYTES = 256
MAX_FAILURE_REASON_BYTES = 65_536

_GYM_ALPHABET = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)


def rollout_key(namespace: str, rollout_id: str) -> bytes:
    """Key of the rollout's hash. Both parts must have been validated."""
    return f"gymcap:{{{namespace}/{rollout_id}}}".encode("ascii")


def ledger_key(namespace: str, rollout_id: str) -> bytes:
    """Key of the hash with the rollout's ledger rows (``gym/ledger_rows.py``), in the rollout's own slot."""
    return rollout_key(namespace, rollout_id) + b":ledger"


def staged_key(namespace: str, rollout_id: str) -> bytes:
    """Key of the hash of what was staged for the rollout: beside it in its slot, and never mixed with it."""
    return rollout_key(namespace, rollout_id) + b":staged"


def new_name() -> str:
    """Make a random name (128 bits) for an attempt of a rollout that may begin, or for a snapshot."""
    return secrets.token_hex(16)


def new_mark_id() -> str:
    """Make a random name (64 bits) for a mark, by which the same mark is known when it is made again."""
    return secrets.token_hex(8)


def refusal_row(code: str) -> bytes:
    """How the row of a refused call begins, before the digest and the details."""
    return REFUSED + code.encode() + b"\0"


def validate_namespace(namespace: object) -> str:
    """Return ``namespace`` if it is 1 to 64 characters of Gym's alphabet.

    Raises:
        InvalidIdentifierError: otherwise.

    """
    return _gym_identifier("namespace", namespace, MAX_NAMESPACE_LENGTH)


def validate_rollout_id(rollout_id: object) -> str:
    """Return ``rollout_id`` if it is 1 to 255 characters of Gym's alphabet (letters, digits, ``._-``).

    Raises:
        InvalidIdentifierError: otherwise.

    """
    return _gym_identifier("rollout id", rollout_id, MAX_ROLLOUT_ID_LENGTH)


def distinct(rollout_ids: Iterable[str]) -> list[str]:
    """Each id once, in the order given.

    Raises:
        TypeError: a bare string, or no iterable.

    """
    if isinstance(rollout_ids, str | bytes):
        raise TypeError(f"rollout_ids must be several ids, not one {type(rollout_ids).__name__}")
    try:
        ids = iter(rollout_ids)
    except TypeError:
        told = f"rollout_ids must be an iterable of ids, not of type {type(rollout_ids).__name__}"
        raise TypeError(told) from None
    return list(dict.fromkeys(ids))


def validate_call_id(model_call_id: object, *, rollout_id: str, allow_empty: bool = False) -> str:
    """Return ``model_call_id`` if it is a string of 1 to 1,024 bytes of UTF-8.

    ``allow_empty`` is for ``mark_incomplete``, which may speak of the rollout as a whole.

    Raises:
        InvalidIdentifierError: otherwise.

    """
    problem = _text_problem(model_call_id, MAX_CALL_ID_BYTES, allow_empty=allow_empty)
    if problem or not isinstance(model_call_id, str):
        raise InvalidIdentifierError(
            f"model call id of rollout {rollout_id} is refused: {problem}; "
            f"it must be a string of 1 to {MAX_CALL_ID_BYTES} bytes of UTF-8",
            rollout_id=rollout_id,
        )
    return model_call_id


def validate_refusal_code(code: object, *, rollout_id: str, model_call_id: str) -> str:
    """Return ``code`` if it is a string of 1 to 256 bytes of UTF-8 without NUL.

    Raises:
        InvalidIdentifierError: otherwise.

    """
    problem = _text_problem(code, MAX_REFUSAL_CODE_BYTES)
    if not problem and isinstance(code, str) and "\0" in code:
        problem = "it holds a NUL character"
    if problem or not isinstance(code, str):
        raise InvalidIdentifierError(
            f"refusal code for call {model_call_id!r} of rollout {rollout_id} is refused: {problem}",
            rollout_id=rollout_id,
            model_call_id=model_call_id,
        )
    return code


def validate_failure_reason(reason: object, *, rollout_id: str, model_call_id: str) -> str:
    """Return ``reason`` if it is a string of 1 to 65,536 bytes of UTF-8.

    Raises:
        InvalidIdentifierError: otherwise.

    """
    problem = _text_problem(reason, MAX_FAILURE_REASON_BYTES)
    if problem or not isinstance(reason, str):
        raise InvalidIdentifierError(
            f"failure reason for call {model_call_id!r} of rollout {rollout_id} is refused: {problem}",
            rollout_id=rollout_id,
            model_call_id=model_call_id,
        )
    return reason


def _gym_identifier(what: str, value: object, max_length: int) -> str:
    if isinstance(value, str) and 1 <= len(value) <= max_length and _GYM_ALPHABET.fullmatch(value):
        return value
    shown = repr(value) if isinstance(value, str) else f"of type {type(value).__name__}"
    if len(shown) > 2 * MAX_NAMESPACE_LENGTH:
        shown = shown[: 2 * MAX_NAMESPACE_LENGTH] + "…"
    if may_be_url(shown):
        shown = "that is a URL"
    raise InvalidIdentifierError(
        f"{what} {shown} is refused: it must be 1 to {max_length} ASCII letters, digits, '.', '_' or '-'"
    )


def _text_problem(value: object, max_bytes: int, *, allow_empty: bool = False) -> str:
    if not isinstance(value, str):
        return f"it is of type {type(value).__name__}"
    if not value and not allow_empty:
        return "it is empty"
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        return "it is not valid UTF-8"
    return f"it has {size} bytes" if size > max_bytes else ""
