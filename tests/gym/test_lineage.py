"""The lineage store finds the parents that Gym's own store finds, in few round trips and from any process."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture", reason="the lineage store is a part of NeMo Gym's capture")

from support.backends import Place
from support.cluster import ClusterGroup
from support.conversations import Turn, continuation, conversation, gym, turn_of, user
from support.sequences import random_ids
from support.servers import RealServer

from gym_capture_redis import RedisLineageStore, RedisTokenSink, RedisTokenSource, gym_compat, scripts
from gym_capture_redis.errors import (
    BackendUnavailableError,
    ConfigurationError,
    CorruptRecordError,
    InvalidIdentifierError,
    TokenCaptureRetiredError,
    UnsupportedFormatError,
)
from gym_capture_redis.gym import lineage
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.subject import Subject

TURNS = 91
MIB = 2**20


class Run:
    """A sink, a source, and any number of stores, as workers have them."""

    def __init__(self, url: str, namespace: str, **settings: Any) -> None:
        self.url, self.settings = url, {"namespace": namespace} | settings
        self.sink = RedisTokenSink(url, **self.settings)
        self.source = RedisTokenSource(url, **self.settings, settle_s=0.001)
        self._stores: list[RedisLineageStore] = []

    def store(self, **settings: Any) -> RedisLineageStore:
        self._stores.append(RedisLineageStore(self.url, **self.settings | settings))
        return self._stores[-1]

    async def put(self, *turns: Turn) -> None:
        for turn in turns:
            await self.sink.put(turn.entry)

    async def close(self) -> None:
        await self.sink.close()
        await self.source.close()
        for store in self._stores:
            await store.close()


@pytest.fixture
async def run(place: Place, namespace: str) -> AsyncIterator[Run]:
    run = Run(place.url, namespace, durability=place.durability)
    yield run
    await run.close()


@pytest.fixture
async def valkey_run(valkey9: RealServer, namespace: str) -> AsyncIterator[Run]:
    run = Run(valkey9.url, namespace)
    yield run
    await run.close()


class Watched:
    """Notes the steps of a store, and what they were answered."""

    def __init__(self, store: RedisLineageStore) -> None:
        self.calls: list[tuple[Call, Reply]] = []
        run = store._client.run

        def watched(call: Call, subject: Subject, *, deadline: float) -> Reply:
            reply = run(call, subject, deadline=deadline)
            self.calls.append((call, reply))
            return reply

        store._client.run = watched  # type: ignore[method-assign]

    def take(self) -> list[tuple[Call, Reply]]:
        taken, self.calls = self.calls, []
        return taken

    def moved(self) -> tuple[int, int, int]:
        """How many round trips, calls and blocks since the last time."""
        taken = self.take()
        calls = sum(len(reply.rest[2]) for call, reply in taken if call.step is Step.INDEX)
        blocks = sum(len(reply.rest[0]) // 2 for call, reply in taken if call.step is Step.BLOCKS)
        return len(taken), calls, blocks


async def assert_parent(store: Any, turn: Turn, items: Any = None) -> None:
    resolution = await store.resolve(turn.entry.rollout_id, items or continuation(turn))
    assert resolution.match is not None, resolution
    assert resolution.match.model_call_id == turn.entry.model_call_id
    assert list(resolution.match.cumulative_token_ids) == turn.ids
    assert resolution.match.digest == turn.entry.digest


async def status_of(store: Any, rollout: str, items: Any) -> str:
    return str((await store.resolve(rollout, items)).status.value)


# Whether it looks where sinks write


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    told = [record.getMessage() for record in caplog.records]
    return [message for message in told if "no sink of this process writes" in message]


@pytest.mark.usefixtures("no_other_sinks")
@pytest.mark.parametrize("differs", ["namespace", "database"])
async def test_a_store_that_looks_where_no_sink_writes_says_so_once(
    valkey9: RealServer, namespace: str, caplog: pytest.LogCaptureFixture, differs: str
) -> None:
    url = valkey9.tcp_url if differs == "namespace" else valkey9.tcp_url.removesuffix("0") + "1"
    run = Run(valkey9.tcp_url, namespace)
    other = RedisLineageStore(url, namespace="other" if differs == "namespace" else namespace)
    for rollout in ("r1", "r2"):
        await other.resolve(rollout, [user("hello"), {"role": "assistant", "content": "hi"}])
    await other.close()
    await run.close()
    (warning,) = warnings_of(caplog)
    assert namespace in warning


@pytest.mark.usefixtures("no_other_sinks")
async def test_a_store_beside_its_sink_or_without_any_says_nothing(
    valkey9: RealServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(valkey9.url, namespace)
    for store in (run.store(), RedisLineageStore(valkey9.url, namespace=namespace)):
        await store.resolve("r", [user("hello")])
        await store.close()
    await run.close()
    assert not warnings_of(caplog)


def test_a_store_is_made_where_it_is_used_and_not_sent_there() -> None:
    with pytest.raises(TypeError, match="a RedisLineageStore cannot be pickled; make one where it is used"):
        pickle.dumps(RedisLineageStore("redis://server", namespace="run"))


# What is found


@pytest.mark.parametrize("deltas", [False, True], ids=["whole prompts", "deltas"])
async def test_two_workers_find_what_gyms_file_store_finds_at_every_turn(
    run: Run, tmp_path: Path, deltas: bool
) -> None:
    files = gym("store", "TokenCaptureStore")(tmp_path)
    theirs = gym("lineage", "FileLineageStore")(tmp_path)
    workers = [run.store(), run.store()]
    for number, turn in enumerate(conversation("r", 12, deltas=deltas)):
        worker = workers[number % 2]
        before = await worker.resolve("r", turn.request)
        assert before == await theirs.resolve("r", turn.request)
        assert str(before.status.value) == ("resolved" if number else "root")
        await run.put(turn)
        await files.put(turn.entry)
        rewritten = [user("another task"), *turn.entry.output_items, user("go on")]
        for request in (rewritten, [user("anew")], continuation(turn)[1:]):
            assert await worker.resolve("r", request) == await theirs.resolve("r", request)
    cold = run.store()
    for turn in conversation("r", 12, deltas=deltas):
        await assert_parent(cold, turn)


async def test_branches_and_retries_are_told_apart_as_gym_tells_them(run: Run, tmp_path: Path) -> None:
    files = gym("store", "TokenCaptureStore")(tmp_path)
    theirs = gym("lineage", "FileLineageStore")(tmp_path)
    first, second = conversation("r", 2)
    twin = turn_of("r", "twin", second.request, second.ids[:950], second.entry.generation_token_ids)
    assert twin.ids == second.ids
    twin.entry.output_items[0] = second.entry.output_items[0]
    gym("lineage", "stamp_continuation")(twin.entry, list(twin.request))
    other = turn_of("r", "other", second.request, second.ids[:950], random_ids(900, 77), parent=first)
    store = run.store()
    for turn in (first, second, twin, other):
        await run.put(turn)
        await files.put(turn.entry)
        for each in (first, second, other):
            assert await store.resolve("r", continuation(each)) == await theirs.resolve(
                "r", continuation(each)
            )
    await assert_parent(store, other)


async def test_an_unknown_rollout_has_roots_and_no_parents(run: Run) -> None:
    (turn,) = conversation("r", 1)
    store = run.store()
    assert await status_of(store, "r", turn.request) == "root"
    assert await status_of(store, "r", continuation(turn)) == "unresolved"
    await run.put(turn)
    await assert_parent(store, turn)


async def test_a_frozen_rollout_is_still_read(run: Run) -> None:
    (turn,) = conversation("r", 1)
    await run.put(turn)
    await run.source.freeze("r")
    await assert_parent(run.store(), turn)


async def test_other_namespaces_are_not_seen(run: Run) -> None:
    (turn,) = conversation("r", 1)
    await run.put(turn)
    assert await status_of(run.store(namespace="another-run"), "r", continuation(turn)) == "unresolved"


async def test_what_one_worker_has_put_is_seen_by_threads_of_another_at_once(valkey_run: Run) -> None:
    async def one(number: int) -> None:
        for turn in conversation(f"r{number}", 8, seed=100 * number):
            await valkey_run.put(turn)
            await assert_parent(stores[number % 2], turn)

    stores = [valkey_run.store(), valkey_run.store()]
    await asyncio.gather(*(one(number) for number in range(16)))


# What it costs


async def test_a_long_rollout_costs_two_round_trips_and_moves_what_is_new(valkey_run: Run) -> None:
    store = valkey_run.store()
    watched = Watched(store)
    moved = []
    turns = list(conversation("r", TURNS))
    for turn in turns:
        await valkey_run.put(turn)
        await assert_parent(store, turn)
        moved.append(watched.moved())
    assert {trips for trips, _, _ in moved} == {2}
    assert {calls for _, calls, _ in moved} == {1}
    # 550 ids a turn are two blocks or three; nothing of what was there before comes again.
    assert {blocks for _, _, blocks in moved} <= {2, 3}

    # Nothing new: nothing but the question whether there is.
    await assert_parent(store, turns[-1])
    assert watched.moved() == (1, 0, 0)

    cold = valkey_run.store()
    watched = Watched(cold)
    await assert_parent(cold, turns[-1])
    assert watched.moved() == (2, TURNS, len(turns[-1].ids) // 256)


async def test_a_chain_of_deltas_comes_in_one_round_trip(valkey_run: Run) -> None:
    turns = list(conversation("r", TURNS, deltas=True))
    await valkey_run.put(*turns)
    cold = valkey_run.store()
    watched = Watched(cold)
    await assert_parent(cold, turns[-1])
    trips, calls, _ = watched.moved()
    assert (trips, calls) == (2, TURNS)


async def test_a_branch_reads_only_from_where_it_leaves_what_is_known(valkey_run: Run) -> None:
    *_, last = conversation("r", 30)
    blocks = len(last.ids) // 256
    store = valkey_run.store()
    await valkey_run.put(last)
    await assert_parent(store, last)
    watched = Watched(store)
    prompt = last.ids[: 256 * (blocks - 3)] + random_ids(600, 5)
    branch = turn_of("r", "branch", [user("branch")], prompt, random_ids(9, 6))
    await valkey_run.put(branch)
    await assert_parent(store, branch)
    trips, _, moved = watched.moved()
    assert trips == 2
    assert moved <= 4, "three blocks of its own, and the one up to the next that was named"


async def ids_of_parent(store: Any, turn: Turn) -> tuple[int, ...]:
    await assert_parent(store, turn)
    resolution = await store.resolve(turn.entry.rollout_id, continuation(turn))
    ids: tuple[int, ...] = resolution.match.cumulative_token_ids
    return ids


async def test_ids_that_the_parent_before_began_with_are_not_made_anew(valkey_run: Run) -> None:
    first, second, third = conversation("r", 3)
    branch = turn_of("r", "branch", [user("branch")], first.ids[:512] + random_ids(900, 5), random_ids(9, 6))
    await valkey_run.put(first, second, third, branch)
    store = valkey_run.store()
    before = await ids_of_parent(store, first)
    for turn, shared in ((second, 512), (third, 1024), (first, 0), (branch, 512), (third, 0)):
        ids = await ids_of_parent(store, turn)
        same = [one is other for one, other in zip(before, ids, strict=False)]
        assert same == [True] * shared + [False] * (len(same) - shared)
        before = ids


async def test_a_call_that_begins_like_the_suffix_of_a_delta_gets_ids_of_its_own(valkey_run: Run) -> None:
    first, delta = conversation("r", 2, deltas=True)
    suffix = delta.ids[len(first.ids) :]
    another = turn_of("r", "another", [user("another")], suffix + random_ids(9, 5), random_ids(9, 6))
    await valkey_run.put(first, delta, another)
    store = valkey_run.store()
    for turn in (delta, another, delta):
        await assert_parent(store, turn)


@pytest.mark.parametrize("lost", ["ids", "references"])
async def test_it_finds_the_same_where_gym_keeps_nothing(valkey_run: Run, lost: str) -> None:
    turns = list(conversation("r", 3))
    store = valkey_run.store(**{"max_cached_tokens": 1} if lost == "ids" else {"max_cached_rollouts": 1})
    (other,) = conversation("other", 1)
    await valkey_run.put(*turns, other)
    for turn in turns:
        await assert_parent(store, turn)
        await assert_parent(store, other)


async def test_experts_and_log_probabilities_stay_where_they_are(valkey_run: Run) -> None:
    experts = [[[number % 200] * 8] * 48 for number in range(550)]
    (turn,) = conversation("r", 1, routed_experts=experts)
    await valkey_run.put(turn)
    store = valkey_run.store()
    watched = Watched(store)
    await assert_parent(store, turn)
    (_, index), (_, blocks) = watched.take()
    assert len(index.rest[2][0][1]) < 4_000
    assert sum(map(len, blocks.rest[0])) < 4_000


async def test_many_steps_are_read_in_pages(valkey_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "_LOOKED_AT_BYTES", 5_000)
    turns = list(conversation("r", 12))
    for turn in turns:
        for number in range(120):
            await valkey_run.sink.mark_incomplete("r", f"{turn.entry.model_call_id}.{number}")
        await valkey_run.put(turn)
    store = valkey_run.store()
    watched = Watched(store)
    await assert_parent(store, turns[-1])
    assert watched.moved()[0] > 3
    for turn in turns:
        await assert_parent(store, turn)


# Attempts that end


@pytest.mark.parametrize("how", ["retire", "delete", "drop"])
async def test_calls_of_an_attempt_that_is_over_are_no_parents(run: Run, how: str) -> None:
    (turn,) = conversation("r", 1)
    store = run.store()
    await run.put(turn)
    await assert_parent(store, turn)
    if how == "drop":
        snapshot = await run.source.freeze("r")
        await run.source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    else:
        await getattr(run.source, how)(["r"])
    for each in (store, run.store()):
        assert await status_of(each, "r", continuation(turn)) == "unresolved"
        assert await status_of(each, "r", turn.request) == "root"


@pytest.mark.parametrize("deltas", [False, True])
async def test_calls_of_the_next_attempt_are_not_taken_for_those_of_the_last(run: Run, deltas: bool) -> None:
    store = run.store()
    for seed in (0, 1_000):
        turns = list(conversation("r", 4, deltas=deltas, seed=seed))
        for turn in turns:
            await run.put(turn)
            await assert_parent(store, turn)
        await run.source.delete(["r"])
        assert await status_of(store, "r", continuation(turns[-1])) == "unresolved"


async def test_ids_that_came_while_the_store_was_closed_are_not_taken_for_those_of_the_next_attempt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, load = run.store(), RedisLineageStore._load_entries

    def closed_meanwhile(closing: RedisLineageStore, *args: Any) -> Any:
        entries = load(closing, *args)
        asyncio.run(closing.close())
        return entries

    (turn,) = conversation("r", 1)
    await run.put(turn)
    with monkeypatch.context() as patch:
        patch.setattr(RedisLineageStore, "_load_entries", closed_meanwhile)
        await assert_parent(store, turn)
    await run.source.delete(["r"])
    turns = list(conversation("r", 2, seed=1_000))
    await run.put(*turns)
    for each in reversed(turns):
        await assert_parent(store, each)


async def test_an_attempt_that_ends_between_the_two_reads_is_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (turn,) = conversation("r", 1)
    await run.put(turn)
    store = run.store()
    missing = store._missing_blocks

    def retire_first(*args: Any) -> Any:
        asyncio.run_coroutine_threadsafe(run.source.retire(["r"]), loop).result()
        return missing(*args)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(store, "_missing_blocks", retire_first)
    with pytest.raises(TokenCaptureRetiredError, match="attempt of the rollout is over"):
        await store.resolve("r", continuation(turn))


# Servers that come back


async def test_a_server_that_is_killed_and_comes_back_is_read_anew(
    valkey9: RealServer, namespace: str
) -> None:
    with RealServer(valkey9.binary, appendfsync="always") as server:
        run = Run(server.url, namespace)
        turns = list(conversation("r", 6))
        store = run.store()
        for turn in turns[:3]:
            await run.put(turn)
            await assert_parent(store, turn)
        server.kill()
        await asyncio.to_thread(server.start)
        for turn in turns[2:]:
            await run.put(turn)
            await assert_parent(store, turn)
        await run.close()


async def test_a_step_that_is_put_back_later_is_found_then(run: Run, place: Place, namespace: str) -> None:
    first, second, third = conversation("r", 3)
    await run.put(first, second, third)
    key = rollout_key(namespace, "r")
    place.redis.hdel(key, "o:2")
    store = run.store()
    await assert_parent(store, third)
    assert await status_of(store, "r", continuation(second)) == "unresolved"
    place.redis.hset(key, "o:2", b"0:r:call-1")
    await assert_parent(store, second)
    await assert_parent(store, third)


async def test_a_server_that_does_not_answer_costs_the_deadline_and_no_more(
    valkey9: RealServer, namespace: str
) -> None:
    (turn,) = conversation("r", 1)
    with RealServer(valkey9.binary) as server:
        run = Run(server.url, namespace)
        await run.put(turn)
        store = run.store(timeout_s=0.5)
        await assert_parent(store, turn)
        server.pause()
        try:
            async with asyncio.timeout(15):
                with pytest.raises(BackendUnavailableError, match=r"within 0\.5 s.*rollout r"):
                    await store.resolve("r", continuation(turn))
        finally:
            server.resume()
        await run.close()


# Damage


async def test_a_missing_or_damaged_block_is_no_parent(run: Run, place: Place, namespace: str) -> None:
    (turn,) = conversation("r", 1)
    await run.put(turn)
    key = rollout_key(namespace, "r")
    fields: Any = place.redis.hgetall(key)
    field, value = next((name, value) for name, value in fields.items() if name.startswith(b"b:"))
    for damaged in (None, value[:-1] + b"\xff", value + value[-1:], b"", value[:16]):
        if damaged is None:
            place.redis.hdel(key, field)
        else:
            place.redis.hset(key, field, damaged)
        with pytest.raises(CorruptRecordError, match="call 'call-0' of rollout r"):
            await run.store().resolve("r", continuation(turn))
    place.redis.hset(key, field, value)
    await assert_parent(run.store(), turn)


async def test_tokens_that_do_not_match_the_digest_are_no_parent(run: Run) -> None:
    (turn,) = conversation("r", 1)
    turn.entry.generation_token_ids[-1] += 1
    await run.put(turn)
    with pytest.raises(ValueError, match="digest"):
        await run.store().resolve("r", continuation(turn))


async def test_a_record_of_a_newer_schema_is_refused_and_a_damaged_one_named(
    run: Run, place: Place, namespace: str
) -> None:
    import msgpack

    (turn,) = conversation("r", 1)
    await run.put(turn)
    key = rollout_key(namespace, "r")
    stored: Any = place.redis.hget(key, "r:call-0")
    record = msgpack.unpackb(stored)
    record["e"]["schema_version"] = 99
    place.redis.hset(key, "r:call-0", msgpack.packb(record))
    with pytest.raises(UnsupportedFormatError, match="call 'call-0' of rollout r"):
        await run.store().resolve("r", continuation(turn))
    for damaged in (b"", b"\x87", stored[:40], b"garbage", stored[1:]):
        place.redis.hset(key, "r:call-0", damaged)
        with pytest.raises(CorruptRecordError, match="call 'call-0' of rollout r"):
            await run.store().resolve("r", continuation(turn))


# Construction


def test_constructing_it_opens_nothing_and_needs_no_loop(namespace: str) -> None:
    threads = threading.active_count()
    settings: dict[str, Any] = {"tls": types.MappingProxyType({"check_hostname": False}), "password": "pw"}
    store = RedisLineageStore("rediss://nowhere.invalid/0", namespace=namespace, **settings)
    assert threading.active_count() == threads
    assert store.is_process_shared()
    assert repr(store) == f"RedisLineageStore('rediss://nowhere.invalid:6379/0', namespace='{namespace}')"
    resolver = gym_compat.gym_attribute("protocols", "LineageResolver")  # before 0.7: LineageStore
    assert isinstance(store, resolver or gym("protocols", "LineageStore"))
    assert callable(partial(store.resolve, "r", []))
    asyncio.run(store.close())
    asyncio.run(store.close())


async def test_closing_it_waits_for_no_thread_of_the_user(valkey_run: Run) -> None:
    (turn,) = conversation("r", 1)
    await valkey_run.put(turn)
    store = valkey_run.store()
    await assert_parent(store, turn)
    loop, release = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocker = loop.run_in_executor(None, release.wait)
    try:
        async with asyncio.timeout(15):
            await store.close()
        assert not blocker.done()
    finally:
        release.set()
        await blocker


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"chunk_bytes": 5}, ConfigurationError, "'chunk_bytes' is not a setting; the settings are.*prefix"),
        ({"max_inflight_bytes": MIB}, ConfigurationError, "'max_inflight_bytes' is not a setting"),
        ({"max_cached_rollouts": 0}, ConfigurationError, "setting 'max_cached_rollouts' is refused"),
        ({"namespace": "a/b"}, InvalidIdentifierError, "namespace 'a/b' is refused"),
        ({"url": 5}, ConfigurationError, "url must be a string"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        RedisLineageStore(**settings)


async def test_a_malformed_rollout_id_is_refused_before_the_network() -> None:
    store = RedisLineageStore("redis://nowhere.invalid/0")
    with pytest.raises(InvalidIdentifierError):
        await store.resolve("a/b", [user("x"), {"role": "assistant", "content": "y"}])


WITHOUT_GYM = """
import sys
sys.modules["nemo_gym"] = None
import gym_capture_redis
from gym_capture_redis import *
assert "RedisLineageStore" not in dir()
try:
    gym_capture_redis.RedisLineageStore
except ImportError as error:
    print(error)
try:
    gym_capture_redis.RedisLineage
except AttributeError as error:
    print(error)
"""


def test_without_gym_the_import_says_what_to_install() -> None:
    child = subprocess.run([sys.executable, "-c", WITHOUT_GYM], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    first, second = child.stdout.splitlines()
    assert first.startswith("NeMo Gym is not installed; this part of gym-capture-redis needs `pip install")
    assert second == "module 'gym_capture_redis' has no attribute 'RedisLineage'"


# Scripts


def test_reads_change_nothing_and_are_told_of_other_attempts(
    cluster_group: ClusterGroup, namespace: str
) -> None:
    """In a Cluster as well, where a script sees one slot only."""

    async def main() -> None:
        run = Run(cluster_group.url, namespace)
        (turn,) = conversation("r", 1)
        await run.put(turn)
        store = run.store()
        await assert_parent(store, turn)
        key = rollout_key(namespace, "r")
        with cluster_group.node_of(key).client() as client:
            before: Any = client.hgetall(key)
            await assert_parent(run.store(), turn)
            for call in (
                scripts.index(key, incarnation="other", from_seq=1, max_bytes=MIB),
                scripts.blocks(key, incarnation="other", known=[], ends=[b"x" * 16]),
            ):
                reply = store._client.run(call, Subject("r"), deadline=store._client.deadline())
                assert reply.code == "RETIRED"
            assert client.hgetall(key) == before
        await run.close()

    asyncio.run(main())
