"""Nothing that is promised depends on what a sink believes to be stored.

Blocks and parts are a few ids and bytes long here, so that the small records of the contract have several.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from support.caches import (
    CACHE_BYTES,
    CACHES,
    CacheOfOthers,
    EmptyCache,
    StaleCache,
    WrongCache,
    sink_with,
    sink_with_new,
)
from support.processes import conversation_of, converse_from_a_process
from support.sample_entries import exact_dump, sample_entry
from support.sequences import growing_conversation
from support.servers import RealServer
from support.stored_state import hash_fields, read_state

from gym_capture_redis import RedisTokenSink, RedisTokenSource, blocks, gym_compat, parts
from gym_capture_redis.block_cache import BlockCache
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.subject import Subject
from gym_capture_redis.testing import Clients, TokenTransportContract
from gym_capture_redis.testing.stateful import TokenTransportMachine, entry_fields

SMALL_BLOCK_IDS = 2
SMALL_PART_BYTES = 4
EXPERTS = [[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]

every_cache = pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)


def use_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_IDS", SMALL_BLOCK_IDS)
    monkeypatch.setattr(parts, "PART_BYTES", SMALL_PART_BYTES)


# The contract


class ContractWithCache(TokenTransportContract):
    """All sinks of a test share one cache, which has seen an earlier attempt of the rollout."""

    kind: ClassVar[type[BlockCache]]

    @pytest.fixture(autouse=True)
    def _backend(self, valkey9: RealServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
        use_small_blocks(monkeypatch)
        self.url, self.namespace = valkey9.url, namespace
        self.cache = self.kind(CACHE_BYTES)

    @pytest.fixture(autouse=True)
    async def _deleted_attempt(self, _backend: None, _fresh_rollout: None) -> None:
        sink = self.sink()
        await sink.begin_call(self.rollout_id, "call-1")
        await asyncio.gather(sink.put(self.entry("call-1")), sink.put(self.other("call-2")))
        await self.source().delete([self.rollout_id])

    def make_sink(self) -> RedisTokenSink:
        return sink_with(self.cache, self.url, namespace=self.namespace)

    def make_source(self) -> RedisTokenSource:
        return RedisTokenSource(self.url, namespace=self.namespace)

    def entry(self, model_call_id: str = "call-1", **fields: Any) -> Any:
        return super().entry(model_call_id, **{"routed_experts": EXPERTS} | fields)


class TestEmptyCache(ContractWithCache):
    kind = EmptyCache


class TestStaleCache(ContractWithCache):
    kind = StaleCache


class TestWrongCache(ContractWithCache):
    kind = WrongCache


class TestCacheOfOthers(ContractWithCache):
    kind = CacheOfOthers


# Random histories

shared_prompts = st.builds(
    lambda shared, own: [7] * shared + own, st.integers(0, 9), st.lists(st.integers(0, 2**63 - 1), max_size=3)
)
long_experts = st.integers(0, 9).map(lambda tokens: [[[token, 1]] for token in range(tokens)])


@every_cache
def test_random_histories_are_told_as_by_the_model(
    kind: type[BlockCache], valkey9: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_blocks(monkeypatch)

    def open_backend() -> Clients:
        namespace, cache = f"history-{uuid.uuid4().hex}", kind(CACHE_BYTES)
        return Clients(
            functools.partial(sink_with, cache, valkey9.url, namespace=namespace),
            functools.partial(RedisTokenSource, valkey9.url, namespace=namespace),
        )

    class Machine(TokenTransportMachine):
        def __init__(self) -> None:
            super().__init__(open_backend)

        @initialize(
            drawn=st.lists(entry_fields(), min_size=3, max_size=3),
            prompts=st.lists(shared_prompts, min_size=3, max_size=3),
            experts=st.lists(long_experts, min_size=3, max_size=3),
        )
        def think_of_contents(self, drawn: Any, prompts: Any = (), experts: Any = ()) -> None:
            self._contents = [
                fields | {"prompt_token_ids": prompt, "routed_experts": routes}
                for fields, prompt, routes in zip(drawn, prompts, experts, strict=True)
            ]

    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=25, stateful_step_count=25),
    )


# Gym's own checks


@every_cache
@pytest.mark.skipif(gym_compat.gym_package() is None, reason="these are NeMo Gym's own checks")
async def test_a_sink_with_any_cache_conforms(
    kind: type[BlockCache], valkey9: RealServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_blocks(monkeypatch)
    run_conformance: Any = gym_compat.gym_attribute("conformance", "run_conformance")
    await run_conformance(
        functools.partial(sink_with, kind(CACHE_BYTES), valkey9.url, namespace=namespace),
        functools.partial(RedisTokenSource, valkey9.url, namespace=namespace),
    )


# A conversation in blocks and parts of the real size

ROLLOUT = "r"
TURNS = 6
NEW_IDS = 400
TOKEN_BYTES = 384
"""Experts of one token in a model of 48 layers that routes to 8."""


def conversation(rollout: str = ROLLOUT, seed: int = 0) -> list[TokenEntry]:
    """Each call repeats the ids and the experts of the one before; the last ones have two parts and three."""
    turns = growing_conversation(TURNS, NEW_IDS, seed=seed)
    routed = np.random.default_rng(seed).integers(0, 128, (TURNS * 1_000, TOKEN_BYTES), "u1")
    return [
        sample_entry(
            rollout,
            f"c{number}",
            prompt_token_ids=ids,
            routed_experts=routed[: 1_000 * (number + 1)],
        )
        for number, ids in enumerate(turns)
    ]


class Wire:
    """Keeps what the puts of one sink were answered."""

    def __init__(self, sink: RedisTokenSink) -> None:
        self.answers: list[str] = []
        self._executor = sink._executors.get()
        self._run = self._executor.run
        self._executor.run = self.run  # type: ignore[method-assign]

    async def run(self, call: Call, subject: Subject, **options: Any) -> Reply:
        reply = await self._run(call, subject, **options)
        if call.step is Step.PUT:
            self.answers.append(reply.code)
        return reply


class Conversation:
    """A sink with one of the caches, a source, and what lies in Redis."""

    def __init__(self, kind: type[BlockCache], server: RealServer, namespace: str) -> None:
        self.redis = server.client()
        self.key = rollout_key(namespace, ROLLOUT)
        self.sink = sink_with(kind(CACHE_BYTES), server.url, namespace=namespace)
        self.source = RedisTokenSource(server.url, namespace=namespace)

    async def hold(self, entries: list[TokenEntry]) -> None:
        for entry in entries:
            await self.sink.begin_call(ROLLOUT, entry.model_call_id)
            await self.sink.put(entry)

    async def holds(self, entries: list[TokenEntry]) -> None:
        snapshot = await self.source.freeze_arrays(ROLLOUT)
        assert not snapshot.incomplete, snapshot.reasons
        assert [dump(entry) for entry in snapshot.entries] == [dump(entry) for entry in entries]
        for found, put in zip(snapshot.entries, entries, strict=True):
            assert np.array_equal(np.asarray(found.routed_experts), np.asarray(put.routed_experts))
        state, fields = read_state(self.redis, self.key), self.fields()
        assert len(fields) == hash_fields(state)
        stored = {field: value for field, value in fields.items() if field[:2] == b"b:"}
        assert len(set(stored.values())) == len(stored) == int(state["blocks"])

    def fields(self) -> dict[bytes, bytes]:
        found: Any = self.redis.hgetall(self.key)
        return dict(found)


def dump(entry: Any) -> Any:
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    lists = {name: np.asarray(getattr(entry, name)).tolist() for name in names}
    return exact_dump(entry.model_copy(update=lists | {"routed_experts": None}))


@pytest.fixture(params=CACHES)
async def talk(
    request: pytest.FixtureRequest, valkey9: RealServer, namespace: str
) -> AsyncIterator[Conversation]:
    made = Conversation(CACHES[request.param], valkey9, namespace)
    async with made.sink, made.source:
        yield made
    made.redis.close()


async def test_a_conversation_comes_back_exactly_and_is_stored_once(talk: Conversation) -> None:
    await talk.hold(conversation())
    await talk.holds(conversation())


async def test_a_belief_that_is_wrong_costs_one_more_try_and_no_third(talk: Conversation) -> None:
    wire = Wire(talk.sink)
    await talk.hold(conversation())
    answers = iter(wire.answers)
    for answer in answers:
        assert answer == "OK" or (answer, next(answers)) == ("MISSING", "OK")
    assert wire.answers.count("OK") == TURNS
    # A wrong cache is right by chance where all of a record is there; each of these brings something new.
    assert wire.answers.count("MISSING") == (TURNS if type(talk.sink._blocks) is WrongCache else 0)


async def test_repeating_everything_stores_nothing(talk: Conversation) -> None:
    await talk.hold(conversation())
    before = talk.fields()
    await talk.hold(conversation())
    assert talk.fields() == before


async def test_what_was_stored_in_a_deleted_attempt_is_stored_again(talk: Conversation) -> None:
    for _ in range(3):
        await talk.hold(conversation())
        await talk.holds(conversation())
        assert await talk.source.delete([ROLLOUT]) == {"removed": [ROLLOUT], "absent": []}
        assert talk.fields() == {}


async def test_what_another_rollout_has_stored_is_stored_in_each(talk: Conversation) -> None:
    for entry in conversation("other"):
        await talk.sink.put(entry)
    await talk.hold(conversation())
    await talk.holds(conversation())


async def test_calls_put_at_once_come_back_exactly_and_are_stored_once(talk: Conversation) -> None:
    entries = conversation()
    await asyncio.gather(*(talk.sink.begin_call(ROLLOUT, entry.model_call_id) for entry in entries))
    await asyncio.gather(*(talk.sink.put(entry) for entry in entries))
    snapshot = await talk.source.freeze(ROLLOUT)
    assert not snapshot.incomplete, snapshot.reasons
    order = [entry.model_call_id for entry in snapshot.entries]
    await talk.holds(sorted(entries, key=lambda entry: order.index(entry.model_call_id)))


# Processes

PROCESSES = 8
TURNS_OF_A_PROCESS = 6


def factories(url: str, namespace: str) -> Iterator[tuple[str, Any]]:
    """Of each kind two workers, all of one rollout."""
    kinds = list(CACHES.values())
    for number in range(PROCESSES):
        kind = kinds[number % len(kinds)]
        settings_ = {"namespace": namespace, "timeout_s": 60}
        yield f"w{number}", functools.partial(sink_with_new, kind, url, **settings_)


def test_processes_with_caches_of_every_kind_share_a_rollout(valkey9: RealServer, namespace: str) -> None:
    workers = dict(factories(valkey9.url, namespace))
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(
            converse_from_a_process,
            [(make_sink, ROLLOUT, worker, TURNS_OF_A_PROCESS) for worker, make_sink in workers.items()],
            chunksize=1,
        )
        pool.close()
        pool.join()
    expected = {
        (worker, entry.model_call_id): exact_dump(entry)
        for worker in workers
        for entry in conversation_of(ROLLOUT, worker, TURNS_OF_A_PROCESS)
    }

    async def check() -> None:
        async with RedisTokenSource(valkey9.url, namespace=namespace) as source:
            snapshot = await source.freeze(ROLLOUT)
            assert not snapshot.incomplete, snapshot.reasons
            assert {
                (entry.model_call_id.split(".")[0], entry.model_call_id): exact_dump(entry)
                for entry in snapshot.entries
            } == expected

    asyncio.run(check())
    with valkey9.client() as client:
        key = rollout_key(namespace, ROLLOUT)
        state, fields = read_state(client, key), client.hlen(key.decode())
    assert fields == hash_fields(state)
