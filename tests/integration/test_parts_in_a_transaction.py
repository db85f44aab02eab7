"""A large part is stored by a command of its own between two scripts, which refuse it as one script would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import ResponseError
from support.backends import EVERY_KIND, place_of
from support.cluster import ClusterGroup
from support.sample_entries import sample_entry
from support.stored_state import FIELD, change_state, hash_fields, parse_state

from gym_capture_redis import scripts
from gym_capture_redis.connection import Link
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.lanes import exchange
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.scripts import MAX_JOINED_BYTES, Call, Reply
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

NAME, OTHER_NAME = b"n" * 16, b"m" * 16
SMALL, LARGE = b"a part", b"x" * (MAX_JOINED_BYTES + 1)
LONG_EXPERTS = np.arange(1_500_000, dtype="i1").reshape(-1, 10, 1)
ATTEMPT, OTHER_ATTEMPT, SNAPSHOT_ID = "1" * 32, "2" * 32, "5" * 32

BOTH_WAYS = pytest.mark.parametrize("part", [SMALL, LARGE], ids=["in the script", "in a transaction"])


@dataclass
class Rollout:
    """One rollout, worked on by one step at a time."""

    link: Link
    redis: redis.Redis
    key: bytes
    incarnation: str = ""

    async def answer(self, call: Call) -> Reply | Exception:
        (answer,) = await exchange(self.link, [call], one_key=False)
        return answer

    async def code(self, call: Call) -> str:
        answer = await self.answer(call)
        assert isinstance(answer, Reply), answer
        return answer.code

    async def stage(self, part: bytes, *, name: bytes = NAME, incarnation: str = "") -> str:
        return await self.code(self.staging(part, name=name, incarnation=incarnation))

    def staging(self, part: bytes, *, name: bytes = NAME, incarnation: str = "") -> Call:
        return scripts.stage(self.key, name, part, incarnation=incarnation or self.incarnation)

    async def freeze(self) -> None:
        """At once, though a server that is new here has time to settle."""
        names = {"new_incarnation": OTHER_ATTEMPT, "new_snapshot_id": SNAPSHOT_ID}
        call = scripts.freeze(self.key, **names, max_bytes=1)
        command = scripts.command([call], self.link.dialect, by_source=True)
        (((code, *_),),), _ = await self.link.pipeline([command])
        assert code == b"OK"

    async def retire(self) -> None:
        names = {"incarnation": self.incarnation, "new_incarnation": OTHER_ATTEMPT}
        assert await self.code(scripts.retire(self.key, **names, tombstone_ttl_s=60)) == "OK"

    @property
    def fields(self) -> dict[bytes, bytes]:
        held: Any = self.redis.hgetall(self.key.decode())
        return dict(held)

    @property
    def is_whole(self) -> bool:
        """Whether the counts of the state are those of the hash."""
        state = parse_state(self.fields[FIELD])
        parts = [value for field, value in self.fields.items() if field.startswith(b"b:")]
        counted = int(state["blocks"]), int(state["bytes"])
        return len(self.fields) == hash_fields(state) and counted == (len(parts), sum(map(len, parts)))


@pytest.fixture(params=EVERY_KIND)
async def rollout(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Rollout]:
    """Begun, with nothing in it but an announced call."""
    with place_of(request, namespace) as place:
        settings = SinkSettings.build(place.url, namespace, {"durability": place.durability})
        link = Link(settings, settings.url.path)
        await link.connect()
        made = Rollout(link, place.redis, rollout_key(namespace, "r"))
        begun = await made.answer(scripts.begin(made.key, "c", new_incarnation=ATTEMPT))
        assert isinstance(begun, Reply)
        made.incarnation = begun.incarnation
        yield made
        await link.close()


@BOTH_WAYS
async def test_a_part_is_stored_once_and_counted(rollout: Rollout, part: bytes) -> None:
    assert [await rollout.stage(part) for _ in range(3)] == ["OK", "SAME", "SAME"]
    assert rollout.fields[b"b:" + NAME] == part
    assert rollout.is_whole
    assert await rollout.stage(part[1:], name=OTHER_NAME) == "OK"
    assert rollout.fields[b"b:" + OTHER_NAME] == part[1:]
    assert rollout.is_whole


@BOTH_WAYS
async def test_a_part_that_is_there_stays_as_it_is(rollout: Rollout, part: bytes) -> None:
    assert await rollout.stage(part) == "OK"
    rollout.redis.hset(rollout.key.decode(), (b"b:" + NAME).decode(), "damaged")
    for end in (None, rollout.freeze):
        if end is not None:
            await end()
        before = rollout.fields
        assert await rollout.stage(part) == "SAME"
        assert rollout.fields == before


@BOTH_WAYS
async def test_a_rollout_that_takes_no_parts_stays_as_it_is(rollout: Rollout, part: bytes) -> None:
    assert await rollout.stage(part, name=OTHER_NAME) == "OK"
    before = rollout.fields
    assert await rollout.stage(part, incarnation=OTHER_ATTEMPT) == "RETIRED"
    assert rollout.fields == before
    await rollout.freeze()
    before = rollout.fields
    assert await rollout.stage(part) == "FROZEN"
    assert rollout.fields == before
    await rollout.retire()
    before = rollout.fields
    assert await rollout.stage(part) == "RETIRED"
    assert rollout.fields == before
    assert before.keys() == {FIELD}


@BOTH_WAYS
async def test_a_rollout_that_is_gone_stays_gone(rollout: Rollout, part: bytes) -> None:
    rollout.redis.delete(rollout.key.decode())
    assert await rollout.stage(part) == "RETIRED"
    assert not rollout.redis.exists(rollout.key.decode())


@BOTH_WAYS
@pytest.mark.parametrize("damage", ["a newer format", "no state", "another type"])
async def test_what_cannot_be_read_is_refused_and_stays_as_it_is(
    rollout: Rollout, part: bytes, damage: str
) -> None:
    key = rollout.key.decode()
    assert await rollout.stage(part, name=OTHER_NAME) == "OK"
    match damage:
        case "a newer format":
            change_state(rollout.redis, rollout.key, format=b"2")
        case "no state":
            rollout.redis.hdel(key, FIELD.decode())
        case "another type":
            rollout.redis.delete(key)
            rollout.redis.set(key, "of another program")
    held = rollout.fields if damage != "another type" else {}
    before = rollout.redis.dump(key)
    error = await rollout.answer(rollout.staging(part))
    assert isinstance(error, ResponseError)
    assert str(error).startswith(("CORRUPT", "NEWER", "WRONGTYPE"))
    if damage == "another type":
        assert rollout.redis.dump(key) == before
    else:
        assert rollout.fields == held


@BOTH_WAYS
@pytest.mark.parametrize("rollout", ["valkey9", "redis7"], indirect=True)
async def test_at_the_memory_limit_nothing_is_stored(rollout: Rollout, part: bytes) -> None:
    before = rollout.fields
    rollout.redis.config_set("maxmemory", 1)
    try:
        error = await rollout.answer(rollout.staging(part))
    finally:
        rollout.redis.config_set("maxmemory", 0)
    assert isinstance(error, ResponseError)
    assert str(error).startswith("OOM") or "maxmemory" in str(error)
    assert rollout.fields == before
    assert await rollout.stage(part) == "OK"


async def test_what_came_without_its_announcement_goes_again(rollout: Rollout) -> None:
    """As where the first script was stopped: its end must not depend on it."""
    sent = scripts.commands([rollout.staging(LARGE)], rollout.link.dialect, by_source=False)
    assert [words[0] for words in sent] == ["MULTI", "EVAL", "HSETNX", "EVAL", "EXEC"]
    rollout.redis.delete(rollout.key.decode())
    await rollout.link.pipeline([sent[0], *sent[2:]])
    assert not rollout.redis.exists(rollout.key.decode())


def test_a_rollout_that_begins_while_its_slot_moves_takes_parts(
    cluster_group: ClusterGroup, namespace: str
) -> None:
    """Its node sends each step on to another one, which has to be asked (ASKING) before the transaction."""
    settings: Any = {"namespace": namespace, "timeout_s": 60.0}
    slot = key_slot(rollout_key(namespace, "r"))
    names = map("r{}".format, count())
    alike = (name for name in names if key_slot(rollout_key(namespace, name)) == slot)
    entries = [sample_entry("r"), sample_entry(next(alike), routed_experts=LONG_EXPERTS)]

    async def put(entry: TokenEntry) -> None:
        async with RedisTokenSink(cluster_group.url, **settings) as sink:
            await sink.put(entry)

    async def check() -> None:
        async with RedisTokenSource(cluster_group.url, **settings) as source:
            for entry in entries:
                snapshot = await source.freeze_arrays(entry.rollout_id)
                assert not snapshot.incomplete, snapshot.reasons
                found: Any = snapshot.entries[0].routed_experts
                expected: Any = entry.routed_experts
                assert np.array_equal(found, expected)

    asyncio.run(put(entries[0]))
    source_node = cluster_group.node_of_slot(slot)
    target = next(node for node in cluster_group.primaries() if node is not source_node)
    cluster_group.migrate_slot(slot, target, between=lambda: asyncio.run(put(entries[1])))
    asyncio.run(check())
