"""Trying a server out before anything is started on it. Touches no data."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console

from gym_capture_redis import scripts
from gym_capture_redis.executor import Executor
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.scripts import Call, Reply
from gym_capture_redis.settings import Durability, SourceSettings
from gym_capture_redis.subject import Subject

ANSWER_S = 5.0
"""How long the server may take to answer."""
SILENT_S = 0.5
"""How long a server that answers may keep a trial write waiting before the terminal says so."""
ASKED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class _TrialWrite(Subject):
    def __str__(self) -> str:
        return "a trial write"


class Trial:
    """What a command asks its server first. See ``trial_of``."""

    def __init__(self, console: Console, executor: Executor, settings: SourceSettings) -> None:
        self._console = console
        self._executor = executor
        self._settings = settings

    async def write(self) -> None:
        """Return when the server can be used; one that came back a moment ago is waited for.

        Raises:
            CaptureError: why it cannot be used.

        """
        name = f"trial-{secrets.token_hex(8)}"
        key = rollout_key(self._settings.namespace, name)
        await self._run(scripts.peek(key), _TrialWrite(name))
        # A snapshot that never was: nothing is dropped, but only a server that is settled says so.
        drop = scripts.drop(
            key, snapshot_id=b"none", version=0, tombstone_ttl_s=self._settings.tombstone_ttl_s
        )
        notice = asyncio.get_running_loop().call_later(SILENT_S, self._say_that_it_waits)
        try:
            await self._run(drop, _TrialWrite(name), more_s=self._settings.settle_s)
        finally:
            notice.cancel()

    async def held_of(self, rollout_ids: Iterable[str]) -> list[str]:
        """Those of the ids that the namespace has something of, a fence included."""
        ids, held = list(rollout_ids), []
        for start in range(0, len(ids), ASKED_AT_ONCE):
            asked = ids[start : start + ASKED_AT_ONCE]
            replies = await asyncio.gather(*map(self._peek, asked))
            held += [name for name, reply in zip(asked, replies, strict=True) if reply.code != "ABSENT"]
        return held

    async def _peek(self, rollout_id: str) -> Reply:
        key = rollout_key(self._settings.namespace, rollout_id)
        return await self._run(scripts.peek(key), Subject(rollout_id))

    async def _run(self, call: Call, subject: Subject, *, more_s: float = 0.0) -> Reply:
        return await self._executor.run(call, subject, deadline=self._executor.deadline() + more_s)

    def _say_that_it_waits(self) -> None:
        self._console.print(
            f"Waiting up to {self._settings.settle_s:g} s: the server was started or promoted a moment ago, "
            "and workers may still be putting back what it forgot."
        )


@asynccontextmanager
async def trial_of(
    console: Console, url: str, *, namespace: str, durability: Durability
) -> AsyncIterator[Trial]:
    """Connect to the server for as long as the context lasts.

    Raises:
        ConfigurationError, InvalidIdentifierError: an option is malformed.

    """
    settings = SourceSettings.build(url, namespace, {"durability": durability, "timeout_s": ANSWER_S})
    executor = Executor(settings)
    try:
        yield Trial(console, executor, settings)
    finally:
        await executor.close()
