"""Caches that know nothing, or what is not so: a sink that has one of them must store the same as any."""

# ruff: noqa: ARG002 - they do not listen

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gym_capture_redis.block_cache import BlockCache
from gym_capture_redis.blocks import TokenSequence
from gym_capture_redis.sink import RedisTokenSink

CACHE_BYTES = 2**24
SEQUENCES = 8


class EmptyCache(BlockCache):
    """Remembers nothing."""

    def _add(
        self, rollout_id: str, incarnation: str, names: Iterable[bytes], sequence: TokenSequence | None
    ) -> None:
        pass


class StaleCache(BlockCache):
    """Takes what was stored in an earlier attempt of the same rollout for stored in this one."""

    def first_unknown(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> int:
        return super().first_unknown(rollout_id, "", sequence)

    def unknown(
        self, rollout_id: str, incarnation: str, parts: Sequence[tuple[bytes, bytes]]
    ) -> Sequence[tuple[bytes, bytes]]:
        return super().unknown(rollout_id, "", parts)

    def learn(self, rollout_id: str, incarnation: str, names: Iterable[bytes]) -> None:
        super().learn(rollout_id, "", names)

    def remember(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> None:
        super().remember(rollout_id, "", sequence)


class WrongCache(BlockCache):
    """Takes everything for stored, until it is told otherwise; and again once a record is stored."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._told: set[str] = set()

    def first_unknown(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> int:
        return 0 if rollout_id in self._told else len(sequence.names)

    def unknown(
        self, rollout_id: str, incarnation: str, parts: Sequence[tuple[bytes, bytes]]
    ) -> Sequence[tuple[bytes, bytes]]:
        return parts if rollout_id in self._told else []

    def forget(self, rollout_id: str) -> None:
        self._told.add(rollout_id)

    def remember(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> None:
        super().remember(rollout_id, incarnation, sequence)
        self._told.discard(rollout_id)


class CacheOfOthers(BlockCache):
    """Gives the sequences of every rollout but the one that was asked for."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self._seen: list[tuple[str, TokenSequence]] = []

    def sequences(self, rollout_id: str) -> tuple[TokenSequence, ...]:
        return tuple(sequence for of, sequence in self._seen[::-1] if of != rollout_id)[:SEQUENCES]

    def remember(self, rollout_id: str, incarnation: str, sequence: TokenSequence) -> None:
        super().remember(rollout_id, incarnation, sequence)
        self._seen.append((rollout_id, sequence.without_tail))


CACHES: dict[str, type[BlockCache]] = {
    "empty": EmptyCache,
    "stale": StaleCache,
    "wrong": WrongCache,
    "of others": CacheOfOthers,
}


def sink_with(cache: BlockCache, url: str, **settings: Any) -> RedisTokenSink:
    """A sink that believes what ``cache`` says."""
    sink = RedisTokenSink(url, **settings)
    sink._blocks = cache
    return sink


def sink_with_new(kind: type[BlockCache], url: str, **settings: Any) -> RedisTokenSink:
    """The same with a cache of its own; with its arguments, a factory that another process can be given."""
    return sink_with(kind(CACHE_BYTES), url, **settings)
