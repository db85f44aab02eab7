"""``RedisTokenSource``: the reader, in the trainer (contract, section 4)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from gym_capture_redis import gym_compat, scripts
from gym_capture_redis.codec import EntryType
from gym_capture_redis.empty_rollouts import EmptyRollouts
from gym_capture_redis.ending import Ender
from gym_capture_redis.endpoint import Endpoint
from gym_capture_redis.inflight import ByteBudget
from gym_capture_redis.keys import distinct
from gym_capture_redis.protocols import FreezeOutcome, TokenCaptureSnapshot
from gym_capture_redis.reading import ManyRollouts, RolloutReader, Room
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.settings import SourceSettings
from gym_capture_redis.subject import Subject

_HIGHEST_VERSION = 2**53
"""The highest that a script can count to."""


class RedisTokenSource(Endpoint[SourceSettings]):
    """Freezes, reads and retires rollouts.

    Constructing it does no I/O: connections are opened at the first call, for each event loop and
    process of its own. Every call ends within ``timeout_s``, retries included.

    Args:
        url: see ``ServerUrl``; None reads ``GYM_CAPTURE_REDIS_URL``, else ``redis://127.0.0.1:6379/0``.
        namespace: the one that the sinks of this run use.
        entry_type: class of the entries; None takes Gym's ``TokenEntry`` where Gym is importable, else ours.
        settings: the fields of ``SourceSettings``.

    Raises:
        ConfigurationError: an unknown setting, by name, or a malformed value.
        InvalidIdentifierError: a malformed namespace.

    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str = "default",
        entry_type: EntryType | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(SourceSettings.build(url, namespace, settings))
        self._entry_type: EntryType = (
            entry_type or gym_compat.gym_attribute("records", "TokenEntry") or TokenEntry
        )
        self._empty_rollouts = EmptyRollouts(repr(self))

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Fence the rollout and return one atomic snapshot; no put of anything new succeeds afterwards.

        Repeating it gives the same ``snapshot_id``; ``version`` and content differ only if something was
        marked since. An unknown rollout gives an empty, complete, frozen snapshot at version 1. What is
        damaged or missing makes the snapshot incomplete and is named in its ``reasons``.

        Raises:
            InvalidIdentifierError: a malformed id; nothing was sent.
            TokenCaptureRetiredError: the rollout was retired, or retired or deleted while it was read.
            CorruptRecordError: another program's value, or no readable state, under the rollout's key.
            UnsupportedFormatError: a newer version wrote it.
            BackendUnavailableError: not read in time; the rollout may be frozen, and freezing again is safe.

        """
        return await self._freeze(rollout_id, arrays=False)

    async def freeze_arrays(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Freeze like ``freeze``, with numpy arrays in the token fields of the entries.

        Ids are int32, or int64 where any needs it, and prompts of one conversation are views of one
        buffer: do not write to them. Log probabilities are float32 where that is exact, else float64;
        nested ``routed_experts`` are one integer array. Every other field is as ``freeze`` gives it.
        """
        return await self._freeze(rollout_id, arrays=True)

    def freeze_many(
        self, rollout_ids: Iterable[str], *, arrays: bool = False, max_inflight_bytes: int | None = None
    ) -> AsyncGenerator[FreezeOutcome, None]:
        """Freeze many rollouts at once, and give the outcome of each as soon as it is there.

        Each id comes once, with its ``snapshot`` (as of ``freeze``, or with ``arrays`` as of
        ``freeze_arrays``) or its ``error``; one that fails leaves the others alone. ``max_inflight_bytes``
        (any number from 1 on; default: the setting) bounds the memory of what was read and not taken yet;
        beyond it, about one chunk for each of 16 readers, and a rollout that is larger than the bound is read
        alone. So a bound below the size of a rollout reads one after another.
        A rollout's deadline does not run while it waits for that room.

        Raises:
            TypeError: ``rollout_ids`` is a bare string or not iterable. Nothing was sent.
            ValueError: ``max_inflight_bytes`` is no positive integer. Nothing was sent.

        """
        ids = distinct(rollout_ids)
        if max_inflight_bytes is None:
            max_inflight_bytes = self._settings.max_inflight_bytes
        if not isinstance(max_inflight_bytes, int) or max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes must be a positive integer, not {max_inflight_bytes!r}")
        reader = self._reader(arrays=arrays)

        async def freeze(rollout_id: str, room: Room) -> TokenCaptureSnapshot:
            return await self._read(reader, rollout_id, room)

        budget = ByteBudget(max_inflight_bytes)
        return ManyRollouts(ids, freeze, budget, self._settings.chunk_bytes).outcomes()

    async def _freeze(self, rollout_id: str, *, arrays: bool) -> TokenCaptureSnapshot:
        return await self._read(self._reader(arrays=arrays), rollout_id)

    async def _read(
        self, reader: RolloutReader, rollout_id: str, room: Room | None = None
    ) -> TokenCaptureSnapshot:
        snapshot = await reader.freeze(self._key(rollout_id), rollout_id, room)
        self._empty_rollouts.note(snapshot)
        return snapshot

    def _reader(self, *, arrays: bool) -> RolloutReader:
        return RolloutReader(self._executors.get(), self._settings, self._entry_type, arrays=arrays)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire exactly the snapshot that was consumed; a tombstone goes on refusing late writers.

        True if it is retired, now or by the same drop before. False, and nothing touched, if anything is
        newer, the id is another's, or the rollout was never frozen.

        Raises:
            InvalidIdentifierError: a malformed id; nothing was sent.
            TypeError: ``snapshot_id`` is no string, or ``version`` no integer; nothing was sent.
            CorruptRecordError, UnsupportedFormatError: as for ``freeze``.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        # Checked here: what redis-py cannot send would fail every step in the same pipeline.
        if not isinstance(snapshot_id, str):
            raise TypeError(f"snapshot_id must be a string, not of type {type(snapshot_id).__name__}")
        if not isinstance(version, int):
            raise TypeError(f"version must be an integer, not of type {type(version).__name__}")
        key = self._key(rollout_id)
        if not 0 <= version <= _HIGHEST_VERSION:
            return False
        call = scripts.drop(
            key,
            snapshot_id=snapshot_id.encode("utf-8", "replace"),
            version=int(version),
            tombstone_ttl_s=self._settings.tombstone_ttl_s,
        )
        executor = self._executors.get()
        reply = await executor.run(call, Subject(rollout_id), deadline=executor.deadline())
        return reply.code == "OK"

    async def retire(self, rollout_ids: Iterable[str]) -> dict[str, list[str]]:
        """Retire rollouts without asking for their snapshots; the fence stays, for unknown ids too.

        Returns ``{"removed": [...], "absent": [...]}``, each id once, in the order given: ``removed`` held
        an entry, a mark or an intent.

        Raises:
            TypeError: a bare string, or no iterable. Nothing was touched.
            InvalidIdentifierError: a malformed id among them. Nothing was touched.
            CorruptRecordError, UnsupportedFormatError: as for ``freeze``; other ids may be retired.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        return await self._ender().retire(self._keys(rollout_ids))

    async def delete(self, rollout_ids: Iterable[str]) -> dict[str, list[str]]:
        """Remove rollouts with their fences, so that the ids can be used again.

        Returns and raises what ``retire`` does. A writer that was announced to the removed attempt is
        still refused; one that was not cannot be told from a new one.
        """
        return await self._ender().delete(self._keys(rollout_ids))

    def _ender(self) -> Ender:
        return Ender(self._executors.get(), tombstone_ttl_s=self._settings.tombstone_ttl_s)
