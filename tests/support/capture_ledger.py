"""Calls as Gym's servers write them to a capture ledger."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.conversations import Items, answer, gym, user

STEP_IDS = 10


class Staged(NamedTuple):
    """A call that was staged: the request, what the model answered, and what is recorded of it."""

    request: Items
    answer: Items
    commit: Any

    @property
    def call(self) -> str:
        name: str = self.commit.record.model_call_id
        return name

    @property
    def next_request(self) -> Items:
        return [*self.request, *self.answer, user("go on")]


def staged(
    rollout: str,
    call: str,
    *,
    parent: Staged | None = None,
    text: str | None = None,
    request: Items | None = None,
    **fields: Any,
) -> Staged:
    """One call; ``text`` is what the model says, ``fields`` are further ones of its ``CallRecord``."""
    previous = parent.commit.record.cum_len if parent else 0
    if request is None:
        request = parent.next_request if parent else [user(f"task of {rollout}")]
    record = {
        "model_call_id": call,
        "parent_call_id": parent.call if parent else None,
        "prev_len": previous,
        "delta_len": STEP_IDS,
        "cum_len": previous + STEP_IDS,
        "weight_version": 3,
        "digest": digest("digest", call),
        "extras_digest": digest("extras", call),
        "staging_key": f"{rollout}/{call}",
        "mode": "token_in" if parent else "text",
        "chain_hash": digest("chain", call),
        "cumulative_hash": digest("cumulative", call),
        "response_id": f"resp-{call}",
        "admitted_at": 1_700_000_000.125,
        "fingerprint_version": gym("fingerprint", "FINGERPRINT_VERSION"),
    }
    said = [answer(text or f"{call} answers")]
    commit = gym("staging.records", "CaptureLedgerCommit")(
        rollout_id=rollout,
        record=gym("staging.records", "CallRecord")(**record | fields),
        staging_chain=(*(parent.commit.staging_chain if parent else ()), f"{rollout}/{call}"),
        request_items=request,
        response_items=said,
    )
    return Staged(request, said, commit)


def chain(rollout: str, calls: int, prefix: str = "call") -> Iterator[Staged]:
    """Calls that each go on from the one before."""
    parent = None
    for number in range(calls):
        parent = staged(rollout, f"{prefix}-{number}", parent=parent)
        yield parent


def digest(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


def calls_in(manifest: dict[str, Any]) -> list[str]:
    """The staged calls, in commit order; the manifest is one that Gym reads."""
    read = gym("staging.records", "RolloutManifest").model_validate(manifest)
    return [record.model_call_id for record in read.records]


def failures_in(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return [(failure["model_call_id"], failure["reason"]) for failure in manifest["failures"]]


def file_ledger(root: Path) -> Any:
    return gym("lineage", "FileLineageStore")(root)


def record_from_a_process(make: Callable[[], Any], rollout: str, worker: str, calls: int) -> int:
    """Target of a spawned process: a conversation of its own, a call that all make, and a failure."""

    async def main() -> None:
        ledger = make()
        await ledger.record(staged(rollout, "shared").commit)
        for call in chain(rollout, calls, worker):
            await ledger.record(call.commit)
            assert (await ledger.resolve(rollout, call.next_request)).match.model_call_id == call.call
        await ledger.record_failure(rollout, f"{worker}-lost", "gone")
        await ledger.close()

    asyncio.run(main())
    return os.getpid()
