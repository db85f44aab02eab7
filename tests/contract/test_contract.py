"""The contract on every backend, and on Gym's own file store as the reference for what both share."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.cluster import ClusterGroup
from support.sentinel import SentinelGroup
from support.servers import RealServer

from gym_capture_redis import RedisTokenSink, RedisTokenSource, TokenCaptureRetiredError, gym_compat
from gym_capture_redis.settings import Durability
from gym_capture_redis.testing import Feature, TokenTransportContract
from gym_capture_redis.testing.backend import contents, exact


class RedisContract(TokenTransportContract):
    """What the contract asks of this package's classes in particular."""

    url: str
    namespace: str
    durability: ClassVar[Durability] = "aof"

    def make_sink(self) -> RedisTokenSink:
        return RedisTokenSink(self.url, namespace=self.namespace, durability=self.durability)

    def make_source(self) -> RedisTokenSource:
        return RedisTokenSource(self.url, namespace=self.namespace, durability=self.durability)

    def pickled(self, client: Callable[..., Any]) -> Any:
        """Return a client made from a factory that was pickled, as in a Ray actor."""
        factory = functools.partial(
            client, self.url, namespace=self.namespace, durability=self.durability, timeout_s=20
        )
        return pickle.loads(pickle.dumps(factory))()

    async def test_clients_are_made_from_pickled_factories(self) -> None:
        async with self.pickled(RedisTokenSink) as sink, self.pickled(RedisTokenSource) as source:
            await sink.put(self.entry())
            assert len((await source.freeze(self.rollout_id)).entries) == 1

    async def test_one_client_serves_several_event_loops(self) -> None:
        sink, source = self.sink(), self.source()
        await sink.put(self.entry("call-1"))

        async def in_another_loop() -> Any:
            await sink.put(self.entry("call-2"))
            snapshot = await source.freeze(self.rollout_id)
            await sink.close()
            await source.close()
            return snapshot

        snapshot = await asyncio.to_thread(lambda: asyncio.run(in_another_loop()))
        assert contents(snapshot).keys() == {"call-1", "call-2"}
        await self.assert_unchanged(snapshot)

    async def test_arrays_are_the_same_content_as_lists(self) -> None:
        entry = self.entry(generation_log_probs=[-0.1, -0.25], routed_experts=[[[1, 300]], [[2, 3]]])
        await self.put(entry)
        arrays = entry.model_copy(
            update={
                "prompt_token_ids": np.array(entry.prompt_token_ids, np.uint32),
                "generation_token_ids": np.array(entry.generation_token_ids, np.int64),
                "generation_log_probs": np.array(entry.generation_log_probs, np.float64),
                "routed_experts": np.array(entry.routed_experts, np.int16),
            }
        )
        await self.put(arrays)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    async def test_gyms_entry_is_the_same_content_as_ours(self) -> None:
        gym_entry = gym_compat.gym_attribute("records", "TokenEntry")
        if gym_entry is None:
            pytest.skip("NeMo Gym is not installed")
        entry = self.entry(parent_resolution="root", extra={"a": [1, 2.5]})
        await self.put(gym_entry.model_validate(entry.model_dump(mode="json")))
        await self.put(entry)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert snapshot.version == 2

    async def test_entries_come_back_in_the_class_that_was_asked_for(self) -> None:
        await self.put(self.entry())
        source = RedisTokenSource(
            self.url, namespace=self.namespace, durability=self.durability, entry_type=self.entry_type
        )
        async with source:
            (found,) = (await source.freeze(self.rollout_id)).entries
        assert type(found) is self.entry_type

    async def test_a_large_rollout_is_read_in_chunks_and_comes_back_whole(self) -> None:
        entries = [self.entry(f"call-{number}", prompt_token_ids=[number] * 500) for number in range(20)]
        sink = self.sink()
        for entry in entries:
            await sink.put(entry)
        source = RedisTokenSource(
            self.url, namespace=self.namespace, durability=self.durability, chunk_bytes=1
        )
        async with source:
            snapshot = await source.freeze(self.rollout_id)
        assert contents(snapshot) == {entry.model_call_id: exact(entry) for entry in entries}
        assert not snapshot.incomplete

    async def test_namespaces_are_apart(self) -> None:
        snapshot = await self.given_frozen()
        other = RedisTokenSink(self.url, namespace=f"{self.namespace}-2", durability=self.durability)
        async with other:
            await other.put(self.other())
            await other.mark_incomplete(self.rollout_id)
        await self.assert_unchanged(snapshot)

    async def test_a_late_put_is_refused_after_its_rollout_was_frozen_dropped_and_begun_again(self) -> None:
        late = self.sink()
        await late.begin_call(self.rollout_id, "call-1")
        await self.drop(await self.freeze())
        await self.source().delete([self.rollout_id])
        await self.begin("call-2")
        with pytest.raises(TokenCaptureRetiredError):
            await late.put(self.entry())


class TestFakeRedis(RedisContract):
    url = "fakeredis://contract"
    durability = "memory"

    @pytest.fixture(autouse=True)
    def _backend(self, namespace: str) -> None:
        self.namespace = namespace


class TestValkey9(RedisContract):
    @pytest.fixture(autouse=True)
    def _backend(self, valkey9: RealServer, namespace: str) -> None:
        self.url, self.namespace = valkey9.url, namespace


class TestRedis7(RedisContract):
    @pytest.fixture(autouse=True)
    def _backend(self, redis7: RealServer, namespace: str) -> None:
        self.url, self.namespace = redis7.url, namespace


class TestCluster(RedisContract):
    @pytest.fixture(autouse=True)
    def _backend(self, cluster_group: ClusterGroup, namespace: str) -> None:
        self.url, self.namespace = cluster_group.url, namespace


class TestSentinel(RedisContract):
    @pytest.fixture(autouse=True)
    def _backend(self, sentinel_group: SentinelGroup, namespace: str) -> None:
        self.url, self.namespace = sentinel_group.url, namespace


@pytest.mark.skipif(gym_compat.gym_package() is None, reason="NeMo Gym, the reference, is not installed")
class TestGymFileStore(TokenTransportContract):
    """Where these pass, the suite asks nothing that Gym itself does not do."""

    entry_type: ClassVar[Any] = gym_compat.gym_attribute("records", "TokenEntry")
    frozen_error: ClassVar[type[Exception]] = RuntimeError
    retired_error: ClassVar[type[Exception]] = RuntimeError
    conflict_error: ClassVar[type[Exception]] = ValueError

    has_refusals: ClassVar[Feature] = "Gym's file store records no refusals"
    has_retire: ClassVar[Feature] = "Gym's file store retires with drop only"
    has_delete: ClassVar[Feature] = "Gym's file store deletes one rollout at a time, synchronously"
    repeats_put_after_freeze: ClassVar[Feature] = "Gym's file store refuses the repeat as well"
    fences_attempts: ClassVar[Feature] = "Gym's file store cannot tell two attempts apart"
    refuses_bad_records: ClassVar[Feature] = "Gym's file store writes a changed entry as it is"
    refuses_bad_ids: ClassVar[Feature] = "Gym's file store checks rollout ids only, and only as file names"
    checks_parents: ClassVar[Feature] = "Gym leaves parents to the trajectory builder"
    errors_name_the_call: ClassVar[Feature] = "Gym's file store raises built-in exceptions"
    has_context_managers: ClassVar[Feature] = "Gym's file store holds nothing open"

    @pytest.fixture(autouse=True)
    def _backend(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_sink(self) -> Any:
        store: Any = gym_compat.gym_attribute("store", "TokenCaptureStore")
        return store(self.directory)

    make_source = make_sink
