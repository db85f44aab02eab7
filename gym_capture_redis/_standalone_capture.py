"""The capture flow of a process without Gym. Import it from `gym_capture_redis.capture`, which chooses.

What it records has no continuation metadata: the fingerprints by which a later request finds its parent
are Gym's (contract, section 6). A call that nobody resolved is recorded as unresolved.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gym_capture_redis.records import (
    ParentResolutionStatus,
    TokenEntry,
    check_entry,
    compute_digest,
    cumulative_tokens,
    extract_token_fields,
    response_to_output_items,
    strip_token_fields,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gym_capture_redis.protocols import TokenSink

logger = logging.getLogger(__name__)


@dataclass
class CaptureContext:
    """The model call in flight and where its record goes.

    ``token_sink`` None: the record is staged elsewhere, and no hole is reported from here. ``model``
    overrides the name in the response. ``committed`` turns true when the record is stored.
    """

    rollout_id: str
    model_call_id: str
    token_sink: TokenSink | None
    model: str = ""
    committed: bool = False


class ParentMatch(Protocol):
    """The one call that a request was proven to continue."""

    @property
    def model_call_id(self) -> str: ...


class ParentResolution(Protocol):
    """A decision about a call's parent, of the shape of Gym's ``LineageResolution``."""

    @property
    def status(self) -> str: ...
    @property
    def match(self) -> ParentMatch | None: ...
    @property
    def reason(self) -> str: ...


_context: ContextVar[CaptureContext | None] = ContextVar("gym_capture_redis_context", default=None)


def set_token_sink(context: CaptureContext) -> Token[CaptureContext | None]:
    """Make ``context`` that of the current task; give the result to `reset_token_sink`."""
    return _context.set(context)


def reset_token_sink(token: Token[CaptureContext | None]) -> None:
    """Restore the context that the matching `set_token_sink` replaced."""
    _context.reset(token)


def current_capture_context() -> CaptureContext | None:
    """Return the model call in flight in this task, or None for traffic that is not captured."""
    return _context.get()


async def register_call_intent() -> None:
    """Announce the call in flight to its sink, before generation (contract, section 5).

    Does nothing without a context, without a sink, or if the sink has no ``begin_call``.

    Raises:
        Exception: whatever ``begin_call`` raises. Nothing was generated yet, so failing costs nothing.

    """
    context = _context.get()
    if context is None or context.token_sink is None:
        return
    begin_call = getattr(context.token_sink, "begin_call", None)
    if begin_call is not None:
        await begin_call(context.rollout_id, context.model_call_id)


async def capture_tokens(response: Any, request_messages: Sequence[Any] | None = None) -> None:  # noqa: ARG001
    """Record the call in flight from its complete response (contract, section 5).

    ``response`` is a pydantic model or a dict in Responses, Chat Completions or Messages format.
    Without token ids, or of another type, it leaves a hole: the rollout is marked incomplete, unless the
    context is already committed or has no sink. Failures are logged and marked, never raised; only a
    cancellation passes through. ``request_messages`` is for Gym's lineage and unused without Gym.
    """
    context = _context.get()
    if context is None:
        return
    entry = None
    try:
        payload = _payload_of(response)
        if payload is not None:
            entry = _entry_from(payload, context)
    except Exception as error:  # noqa: BLE001  # whatever a response can provoke, the model call must not fail
        await _report_failure(context, "build", error)
        return
    if entry is None:
        why = "it has no token ids" if payload is not None else f"it is a {type(response).__name__}"
        await _report_hole(context, why)
        return
    await commit_entry(entry)


async def commit_entry(entry: TokenEntry, *, parent_resolution: ParentResolution | None = None) -> None:
    """Store a finished record of the call in flight (contract, section 5).

    Stamps ``cum_len``, ``digest`` and the parent decision on ``entry``: the given one, else the one it
    already has, else unresolved because ``not_attempted``. Does nothing without a context. An entry of
    another rollout or call is not stored, and the rollout is marked incomplete. Failures are logged
    and marked, never raised; only a cancellation passes through.
    """
    context = _context.get()
    if context is None:
        return
    identity = (getattr(entry, "rollout_id", None), getattr(entry, "model_call_id", None))
    # Compared as text only: an id of another type may raise when it is compared.
    named = all(isinstance(part, str) for part in identity)
    if not named or identity != (context.rollout_id, context.model_call_id):
        logger.warning(
            "Rollout %s, model call %s: got the record of another call (%s, %s); it is not stored.",
            context.rollout_id,
            context.model_call_id,
            *identity,
        )
        await _mark_incomplete(context)
        return
    if context.token_sink is None:
        context.committed = True
        return
    try:
        _stamp(entry, parent_resolution)
        await context.token_sink.put(entry)
        context.committed = True
    except Exception as error:  # noqa: BLE001  # a lost record costs the rollout, never the model call
        await _report_failure(context, "store", error)


def _payload_of(response: Any) -> dict[str, Any] | None:
    """Return the response as a dict, or None if it is nothing that could carry token ids."""
    if isinstance(response, dict):
        return response
    if hasattr(response, "model_dump"):
        payload: dict[str, Any] = response.model_dump()
        return payload
    return None


def _entry_from(payload: dict[str, Any], context: CaptureContext) -> TokenEntry | None:
    """Build the record of a response, or None if it has no token ids. Raises ValueError."""
    fields = extract_token_fields(payload)
    if fields is None:
        return None
    output_items, token_item_index = strip_token_fields(response_to_output_items(payload))
    return TokenEntry(
        rollout_id=context.rollout_id,
        model_call_id=context.model_call_id,
        model=context.model or str(payload.get("model") or ""),
        output_items=output_items,
        token_item_index=token_item_index,
        response_id=str(payload.get("id") or "") or None,
        created_at=time.time(),
        **fields,
    )


def _stamp(entry: TokenEntry, resolution: ParentResolution | None) -> None:
    """Fill in what is known only at commit. Raises ValueError if the entry is then inconsistent."""
    sequence = cumulative_tokens(entry)
    entry.cum_len = len(sequence)
    entry.digest = compute_digest(sequence)
    if resolution is not None:
        entry.parent_resolution = ParentResolutionStatus(resolution.status)
        entry.parent_call_id = resolution.match.model_call_id if resolution.match is not None else None
        entry.parent_resolution_reason = resolution.reason or ""
    elif entry.parent_resolution is None:
        # A parent named without a decision about it is a guess, and unresolved calls have no parent.
        entry.parent_resolution = ParentResolutionStatus.UNRESOLVED
        entry.parent_call_id = None
        entry.parent_resolution_reason = "not_attempted"
    check_entry(entry)


async def _report_hole(context: CaptureContext, why: str) -> None:
    """Mark the rollout for a response that should have carried token ids.

    Skipping it would train its text as if the environment had written it.
    """
    if context.committed or context.token_sink is None:
        return
    logger.warning(
        "Rollout %s, model call %s: nothing to capture in the response: %s.",
        context.rollout_id,
        context.model_call_id,
        why,
    )
    await _mark_incomplete(context)


async def _report_failure(context: CaptureContext, step: str, error: Exception) -> None:
    """Log what went wrong and mark the rollout."""
    logger.warning(
        "Rollout %s, model call %s: could not %s the token record.",
        context.rollout_id,
        context.model_call_id,
        step,
        exc_info=error,
    )
    await _mark_incomplete(context)


async def _mark_incomplete(context: CaptureContext) -> None:
    """Mark the rollout; where that is impossible, the log is all that is left to tell."""
    mark = getattr(context.token_sink, "mark_incomplete", None)
    if mark is None:
        logger.error(
            "Rollout %s, model call %s: lost, and %s has no mark_incomplete; the rollout may look complete.",
            context.rollout_id,
            context.model_call_id,
            type(context.token_sink).__name__,
        )
        return
    try:
        await mark(context.rollout_id, context.model_call_id)
    except Exception:
        logger.warning(
            "Rollout %s, model call %s: lost, and marking the rollout incomplete failed.",
            context.rollout_id,
            context.model_call_id,
            exc_info=True,
        )
