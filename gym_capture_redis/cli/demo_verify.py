"""Is what came out of Redis what was served? Pure functions; they know the ledger and never ask Redis.

An entry must equal, in every field, the one that the capture flow makes of the served response. Only
``created_at`` is stamped by the flow itself: it must lie within the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_capture_redis.cli.demo_plan import AttemptBook
from gym_capture_redis.cli.demo_worker import Job
from gym_capture_redis.cli.served_calls import MODEL, RecordedRollout, ServedCall
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.records import ParentResolutionStatus, TokenEntry, compute_digest

_ABSENT = "absent"
_DEFAULTS = {
    name: info.get_default(call_default_factory=True)
    for name, info in TokenEntry.model_fields.items()
    if not info.is_required()
}


def expected_entry(job: Job, served: ServedCall) -> dict[str, Any]:
    """Every field but ``created_at`` of the entry that a served call must have become."""
    sequence = served.prompt_token_ids + served.generation_token_ids
    fields = {
        **_DEFAULTS,
        "rollout_id": job.attempt.rollout_id,
        "model_call_id": served.model_call_id,
        "model": MODEL,
        "prompt_token_ids": served.prompt_token_ids,
        "generation_token_ids": served.generation_token_ids,
        "generation_log_probs": served.generation_log_probs,
        "output_items": served.output_items,
        "token_item_index": served.token_item_index,
        "response_id": job.response_id,
        "cum_len": len(sequence),
        "digest": compute_digest(sequence),
        "parent_resolution": ParentResolutionStatus.UNRESOLVED,
        "parent_resolution_reason": "not_attempted",
    }
    del fields["created_at"]
    return fields


def compare_entry(entry: Any, expected: Mapping[str, Any], *, window: tuple[float, float]) -> list[str]:
    """Name every field of ``entry`` that differs; ``window`` is when the run was, in seconds since 1970.

    ``entry`` may be Gym's or ours. Floats are compared bit by bit, numbers also by type.
    """
    differences = []
    found = {name: getattr(entry, name) for name in type(entry).model_fields} | (entry.model_extra or {})
    created_at = found.pop("created_at", None)
    if not isinstance(created_at, float) or not window[0] <= created_at <= window[1]:
        differences.append(f"created_at is {created_at!r}, outside the run")
    for name in sorted(found.keys() | expected.keys()):
        difference = _difference(found.get(name, _ABSENT), expected.get(name, _ABSENT))
        if difference:
            differences.append(f"{name} {difference}")
    return differences


def _difference(found: Any, expected: Any) -> str:
    """What is different, or nothing."""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return f"has {len(found)} elements instead of {len(expected)}"
        if _same_numbers(found, expected):
            return ""
        where = [at for at, pair in enumerate(zip(found, expected, strict=True)) if not _same(*pair)]
        return f"differs at {len(where)} positions, first at {where[0]}" if where else ""
    return "" if _same(found, expected) else f"is {found!r:.80} instead of {expected!r:.80}"


def _same_numbers(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether both hold the same integers or the same float bits; False also when it cannot tell."""
    kinds = set(map(type, found)) | set(map(type, expected))
    if kinds == {int}:
        return found == expected
    return kinds == {float} and np.array(found).tobytes() == np.array(expected).tobytes()


def _same(found: Any, expected: Any) -> bool:
    """Equality that tells 1 from 1.0 and from True, and 0.0 from -0.0; enums count as their values."""
    return json.dumps(found, sort_keys=True, default=repr) == json.dumps(
        expected, sort_keys=True, default=repr
    )


def judge_snapshot(
    book: AttemptBook,
    snapshot: TokenCaptureSnapshot,
    recording: RecordedRollout,
    *,
    window: tuple[float, float],
) -> list[str]:
    """Everything about the snapshot that is not as the ledger says it must be; empty if all is right."""
    return [
        *_judge_completeness(book, snapshot, recording),
        *_judge_entries(book, snapshot, recording, window),
    ]


def _judge_completeness(
    book: AttemptBook, snapshot: TokenCaptureSnapshot, recording: RecordedRollout
) -> list[str]:
    expected = {
        (recording.call(call).model_call_id, str(code))
        for call, codes in book.reasons.items()
        for code in codes
    }
    problems = []
    if snapshot.incomplete and book.must_be_complete:
        problems.append("is whole, but looks incomplete")
    elif not snapshot.incomplete and not book.must_be_complete:
        problems.append("is damaged, but looks complete")
    problems += [
        f"gives a reason for which nothing was done: {reason}"
        for reason in snapshot.reasons
        if (reason.model_call_id, str(reason.code)) not in expected
    ]
    named = {reason.model_call_id for reason in snapshot.reasons}
    problems += [f"gives no reason for {call}" for call in sorted({call for call, _ in expected} - named)]
    # Every record moves the version by one and freezing by one; a repeated put must not move it.
    steps = len(book.recorded_calls) + 1
    if book.must_be_complete and snapshot.version != steps:
        problems.append(f"is at version {snapshot.version} instead of {steps}")
    return problems


def _judge_entries(
    book: AttemptBook,
    snapshot: TokenCaptureSnapshot,
    recording: RecordedRollout,
    window: tuple[float, float],
) -> list[str]:
    problems = []
    attempt = book.attempt
    if len(book.outcomes) != attempt.call_count:
        problems.append(f"made {len(book.outcomes)} of its {attempt.call_count} calls")
    entries: dict[str, Any] = {entry.model_call_id: entry for entry in snapshot.entries}
    if len(entries) != len(snapshot.entries):
        problems.append("holds a call twice")
    for call in sorted(book.recorded_calls):
        served = recording.call(call)
        entry = entries.pop(served.model_call_id, None)
        if entry is None:
            problems.append(f"lacks {served.model_call_id}")
            continue
        expected = expected_entry(Job(attempt, call), served)
        problems += [
            f"{served.model_call_id}: {difference}"
            for difference in compare_entry(entry, expected, window=window)
        ]
    problems += [f"holds {call}, which was never captured" for call in entries]
    if snapshot.rollout_id != attempt.rollout_id:
        problems.append(f"came as {snapshot.rollout_id}")
    return problems
