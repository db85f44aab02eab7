"""A server that refuses, forgets, hangs or dies: each has its own clear error, and nothing is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import SLOTS, ClusterNode
from support.names import steady_repr
from support.proxies import StallingProxy
from support.sample_entries import exact_dump, sample_entry
from support.sentinel import SentinelServer
from support.servers import RealServer, free_port

from gym_capture_redis.errors import (
    BackendUnavailableError,
    CallConflictError,
    CaptureError,
    ConfigurationError,
    DurabilityError,
    InvalidRecordError,
    RecordTooLargeError,
    TokenCaptureRetiredError,
)
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
SECRET = "sword-fish-7"
PATIENCE_S = 30.0
"""Far longer than any deadline below: only a call that hangs reaches it."""

SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": PATIENCE_S}
CALLERS = 64
RECORD_BYTES = 2**21
LONG_EXPERTS = np.zeros((30_000, 48, 1), dtype="i1")
"""Two parts, each too large to go in a script."""


def configure(server: RealServer, **config: Any) -> None:
    with server.client() as client:
        for name, value in config.items():
            client.config_set(name.replace("_", "-"), value)


def create_user(server: RealServer, *rules: str) -> str:
    """A user with all permissions changed by ``rules``; returns the URL with its password."""
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", f">{SECRET}", "~*", "&*", "+@all", *rules)
    return f"redis://worker:{SECRET}@127.0.0.1:{server.port}/0"


async def first_error(url: str, **settings: Any) -> CaptureError:
    """What the very first call meets; it must be ours, and never show the password."""
    async with RedisTokenSink(url, **SETTINGS | settings) as sink, asyncio.timeout(PATIENCE_S):
        with pytest.raises(CaptureError) as refusal:
            await sink.begin_call("r", "c")
    shown = f"{refusal.value} {refusal.value!r} {refusal.value.__cause__!r}"
    assert SECRET not in shown
    assert "rollout r" in shown
    assert (refusal.value.rollout_id, refusal.value.model_call_id) == ("r", "c")
    return refusal.value


def check(error: CaptureError, error_class: type[CaptureError], message: str) -> None:
    assert type(error) is error_class, error
    assert re.search(message, str(error)), error


# Credentials and permissions


@pytest.mark.parametrize("given", [None, "wrong", f"{SECRET}x"])
async def test_a_wrong_or_missing_password_is_told_at_once(server: RealServer, given: str | None) -> None:
    configure(server, requirepass=SECRET)
    error = await first_error(server.url, password=given)
    check(error, ConfigurationError, "refused the user or password")


async def test_the_right_password_works_as_a_setting_and_in_the_url(server: RealServer) -> None:
    configure(server, requirepass=SECRET)
    for url, settings in (
        (server.url, {"password": SECRET}),
        (f"redis://:{SECRET}@127.0.0.1:{server.port}/0", {}),
        (f"redis://:wrong@127.0.0.1:{server.port}/0", {"password": SECRET}),
    ):
        async with RedisTokenSink(url, **SETTINGS, **settings) as sink:
            await sink.begin_call("r", "c")


@pytest.mark.parametrize(
    "rules",
    [("-eval", "-evalsha"), ("-info",), ("-hset",), ("resetkeys", "~other:*")],
    ids=" ".join,
)
async def test_a_user_without_a_permission_is_told_so(server: RealServer, rules: tuple[str, ...]) -> None:
    error = await first_error(create_user(server, *rules))
    check(error, ConfigurationError, "does not permit this user")
    check(error, ConfigurationError, r"docs/operations\.md lists them \(.*(permission|can't run)")


async def test_the_permissions_that_the_docs_list_are_enough_for_every_call(server: RealServer) -> None:
    (line,) = re.findall(r"^ACL SETUSER .*$", OPERATIONS.read_text(), re.MULTILINE)
    assert ">secret" in line
    with server.client() as client:
        client.execute_command(*line.split())
    url = f"redis://capture:secret@127.0.0.1:{server.port}/0"
    async with RedisTokenSink(url, **SETTINGS) as sink, RedisTokenSource(url, **SETTINGS) as source:
        for rollout in ("dropped", "retired", "deleted"):
            await sink.begin_call(rollout, "announced")
            for call in ("announced", "unannounced"):
                await sink.put(sample_entry(rollout, call, prompt_token_ids=[1] * 600))
            await sink.record_engine_refusal(rollout, model_call_id="refused", code="full")
            for _ in range(2):
                await sink.mark_incomplete(rollout, "lost")
            with pytest.raises(CallConflictError):
                await sink.put(sample_entry(rollout, "announced"))
        await sink.put(sample_entry("dropped", "long", routed_experts=LONG_EXPERTS))
        async with RedisTokenSource(url, **SETTINGS, chunk_bytes=1) as reader:
            snapshot = await reader.freeze("dropped")
        assert len(snapshot.entries) == 3
        assert await source.drop("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert await source.retire(["retired", "unheard"]) == {"removed": ["retired"], "absent": ["unheard"]}
        assert await source.delete(["deleted"]) == {"removed": ["deleted"], "absent": []}


async def test_where_config_is_forbidden_the_user_vouches_for_appendfsync(server: RealServer) -> None:
    url = create_user(server, "-config")
    check(await first_error(url), DurabilityError, "forbids CONFIG GET.*assume_appendfsync")
    check(await first_error(url, durability="fsync", assume_appendfsync="everysec"), DurabilityError, "weak")
    async with RedisTokenSink(url, **SETTINGS, assume_appendfsync="everysec") as sink:
        await sink.begin_call("r", "c")
    async with RedisTokenSink(url, **SETTINGS, durability="memory") as sink:
        await sink.begin_call("r", "c")


@pytest.mark.parametrize(
    ("renamed", "error_class", "message"),
    [
        (("EVAL", "EVALSHA"), ConfigurationError, "runs no Lua scripts"),
        (("CONFIG",), DurabilityError, "forbids CONFIG GET"),
    ],
)
async def test_a_server_without_a_command_is_told_so(
    real_server: RealServer,
    tmp_path: Any,
    renamed: tuple[str, ...],
    error_class: type[CaptureError],
    message: str,
) -> None:
    config = tmp_path / "renamed.conf"
    config.write_text("".join(f'rename-command {name} ""\n' for name in renamed))
    with RealServer(real_server.binary, include=str(config)) as own:
        check(await first_error(own.url), error_class, message)


async def test_a_database_that_does_not_exist_is_told_at_once(server: RealServer) -> None:
    check(await first_error(f"{server.url}?db=99"), ConfigurationError, "database")


# A server of another kind


async def test_a_server_of_another_kind_than_the_url_says_is_told_at_once(real_server: RealServer) -> None:
    place = f"127.0.0.1:{real_server.port}"
    error = await first_error(f"redis+cluster://{place}")
    check(error, ConfigurationError, f"^{place} is no node of a Cluster; use redis://")
    error = await first_error(f"redis+sentinel://{place}/service")
    check(error, ConfigurationError, f"^{place} is no Sentinel")
    with ClusterNode(real_server.binary) as node:
        check(await first_error(node.tcp_url), ConfigurationError, r"use redis\+cluster://")
        node.ask("ADDSLOTSRANGE", 0, SLOTS - 1)
        check(await first_error(node.tcp_url), ConfigurationError, r"use redis\+cluster://")
    with SentinelServer(real_server.binary, real_server.port) as sentinel:
        check(await first_error(sentinel.tcp_url), ConfigurationError, r"use redis\+sentinel://.*/service")
        error = await first_error(f"redis+cluster://127.0.0.1:{sentinel.port}")
        check(error, ConfigurationError, "is no node of a Cluster")


# Durability


@pytest.mark.parametrize(
    ("config", "durability", "line"),
    [
        ({"appendonly": "no"}, "aof", "appendonly yes"),
        ({"appendonly": "no"}, "fsync", "appendonly yes"),
        ({"appendonly": "no"}, "memory", None),
        ({"appendfsync": "no"}, "aof", "appendfsync everysec"),
        ({"appendfsync": "no"}, "memory", None),
        ({"appendfsync": "everysec"}, "fsync", "appendfsync always"),
        ({"appendfsync": "everysec"}, "aof", None),
        ({"appendfsync": "always"}, "fsync", None),
        ({"maxmemory_policy": "allkeys-lru"}, "memory", "maxmemory-policy noeviction"),
        ({"maxmemory_policy": "allkeys-lru"}, "aof", "maxmemory-policy noeviction"),
        ({"maxmemory_policy": "volatile-ttl"}, "fsync", "maxmemory-policy noeviction"),
    ],
)
async def test_a_promise_the_server_cannot_keep_is_refused_with_the_line_to_set(
    server: RealServer, config: dict[str, str], durability: str, line: str | None
) -> None:
    configure(server, **{"appendfsync": "always"} | config)
    if line is not None:
        check(await first_error(server.url, durability=durability), DurabilityError, f"set `{line}`")
        with server.client() as client:
            assert client.dbsize() == 0
        configure(server, appendonly="yes", appendfsync="always", maxmemory_policy="noeviction")
    async with RedisTokenSink(server.url, **SETTINGS, durability=durability) as sink:
        await sink.begin_call("r", "c")


async def test_the_promise_is_checked_again_when_the_server_comes_back_configured_otherwise(
    server: RealServer,
) -> None:
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        await sink.begin_call("r", "c")
        server.kill()
        server.config["appendonly"] = "no"
        server.start()
        for call in (sink.begin_call("r", "c"), sink.put(sample_entry("r", "c"))):
            with pytest.raises(DurabilityError, match="set `appendonly yes`"):
                await call


# Memory


async def until_it_works(call: Callable[[], Awaitable[Any]]) -> None:
    """UNLINK gives memory back in the background: ask again until then."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await call()
            except BackendUnavailableError:
                await asyncio.sleep(0.01)
            else:
                return


async def test_at_the_memory_limit_records_are_refused_and_all_that_frees_memory_works(
    server: RealServer,
) -> None:
    names = ("dropped", "retired", "deleted", "marked", "refused")
    async with (
        RedisTokenSink(server.url, **SETTINGS) as sink,
        RedisTokenSource(server.url, **SETTINGS) as source,
    ):
        with server.client() as client:
            empty: Any = client.info("memory")
        for name in names:
            await sink.begin_call(name, "open")
            await sink.put(sample_entry(name, "c", note="x" * RECORD_BYTES))
        with server.client() as client:
            client.script_flush()
            # Far enough from all that is stored: buffers of connections come and go.
            client.config_set("maxmemory", empty["used_memory"] + 7 * RECORD_BYTES // 2)
            key = rollout_key("run", "marked")
            before = client.hgetall(key)
            for name in ("marked", "new"):
                for refused in (
                    sink.put(sample_entry(name, "new")),
                    sink.begin_call(name, "new"),
                    sink.put(sample_entry(name, "open")),
                ):
                    with pytest.raises(BackendUnavailableError, match=r"out of memory.*nothing was stored"):
                        await refused
            assert client.hgetall(key) == before
            assert client.dbsize() == len(names)

            await sink.mark_incomplete("marked", "lost")
            await sink.mark_incomplete("never-heard-of")
            await sink.record_engine_refusal("refused", model_call_id="open", code="overloaded")
            snapshots = {name: await source.freeze(name) for name in names}
            assert {name for name in names if not snapshots[name].incomplete} == {"refused"}
            assert all(len(snapshot.entries) == 1 for snapshot in snapshots.values())
            assert await source.drop(
                "dropped",
                snapshot_id=snapshots["dropped"].snapshot_id,
                version=snapshots["dropped"].version,
            )
            assert (await source.retire(["retired", "unheard"]))["removed"] == ["retired"]
            assert (await source.delete(["deleted"]))["removed"] == ["deleted"]
        await until_it_works(lambda: sink.begin_call("deleted", "again"))
        await until_it_works(lambda: sink.put(sample_entry("deleted", "again")))
        snapshot = await source.freeze("deleted")
        assert (len(snapshot.entries), snapshot.incomplete) == (1, False)


# Records that are refused


def with_changes(**changes: Any) -> Any:
    """An entry that was valid when it was made."""
    return sample_entry("odd", "c").model_copy(update=changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": [-1]},
        {"generation_log_probs": [-0.5]},
        {"routed_experts": np.array(b"abc")},
        {"model": None},
        {"cum_len": object()},
        {"output_items": [{"\ud800": 1}]},
    ],
    ids=steady_repr,
)
async def test_a_record_refused_before_the_network_is_named_and_its_intent_still_tells(
    valkey9: RealServer, namespace: str, changes: dict[str, Any]
) -> None:
    async with (
        RedisTokenSink(valkey9.url, namespace=namespace) as sink,
        RedisTokenSource(valkey9.url, namespace=namespace) as source,
    ):
        await sink.begin_call("odd", "c")
        with pytest.raises(InvalidRecordError, match="call 'c' of rollout odd") as refusal:
            await sink.put(with_changes(**changes))
        assert (refusal.value.rollout_id, refusal.value.model_call_id) == ("odd", "c")
        snapshot = await source.freeze("odd")
        assert (len(snapshot.entries), snapshot.incomplete) == (0, True)


async def test_details_of_a_refusal_above_their_limit_are_refused_and_leave_the_intent(
    valkey9: RealServer, namespace: str
) -> None:
    async with (
        RedisTokenSink(valkey9.url, namespace=namespace) as sink,
        RedisTokenSource(valkey9.url, namespace=namespace) as source,
    ):
        for rollout, nbytes in (("fits", 60_000), ("too-long", 70_000)):
            await sink.begin_call(rollout, "c")
            refuse = sink.record_engine_refusal(rollout, model_call_id="c", code="full", why="x" * nbytes)
            if rollout == "fits":
                await refuse
                continue
            with pytest.raises(InvalidRecordError, match="more than 65536"):
                await refuse
        assert not (await source.freeze("fits")).incomplete
        assert (await source.freeze("too-long")).incomplete


# Records too large


async def test_a_record_above_the_limit_is_refused_before_it_is_sent(valkey9: RealServer) -> None:
    async with RedisTokenSink(valkey9.url, **SETTINGS, max_record_bytes=1_000) as sink:
        await sink.begin_call("too-large", "c")
        with pytest.raises(
            RecordTooLargeError, match=r"limit max_record_bytes is 1000.*'c' of rollout too-large"
        ):
            await sink.put(sample_entry("too-large", "c", note="x" * 1_000))
        node = sink._executors.get()._topology.node_of(b"")
        assert node is not None
        assert node.is_idle


async def test_300_mb_of_routed_experts_are_refused_by_default(valkey9: RealServer, namespace: str) -> None:
    experts = np.zeros((300 * 2**20 // (48 * 8), 48, 8), np.uint8)
    async with RedisTokenSink(valkey9.url, namespace=namespace) as sink:
        entry = sample_entry("r", "c").model_copy(update={"routed_experts": experts})
        with pytest.raises(RecordTooLargeError, match=f"max_record_bytes is {256 * 2**20}"):
            await sink.put(entry)


async def test_a_record_of_33_mb_goes_through_whole(valkey9: RealServer, namespace: str) -> None:
    experts = np.arange(32_768 * 48 * 8, dtype=np.uint32).astype(np.uint16).reshape(32_768, 48, 8)
    async with (
        RedisTokenSink(valkey9.url, namespace=namespace) as sink,
        RedisTokenSource(valkey9.url, namespace=namespace, chunk_bytes=2**20) as source,
    ):
        await sink.put(sample_entry("r", "c").model_copy(update={"routed_experts": experts}))
        (entry,) = (await source.freeze("r")).entries
        assert np.array_equal(np.array(entry.routed_experts, np.uint16), experts)


# A server that is away


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_where_nothing_listens_a_call_ends_at_its_deadline(kind: str, tmp_path: Any) -> None:
    where = f"127.0.0.1:{free_port()}" if kind == "tcp" else f"{tmp_path}/none"
    url = f"redis://user:{SECRET}@{where}/0" if kind == "tcp" else f"unix://user:{SECRET}@{where}"
    error = await first_error(url, timeout_s=0.3)
    check(error, BackendUnavailableError, rf"{re.escape(where)}.* no answer within 0\.3 s")
    check(error, BackendUnavailableError, "Connect call failed" if kind == "tcp" else "No such file")


async def test_a_server_that_starts_late_is_waited_for(one_server: RealServer) -> None:
    one_server.kill()
    async with RedisTokenSink(one_server.url, **SETTINGS) as sink:
        early = asyncio.create_task(sink.begin_call("r", "c"))
        await asyncio.sleep(0)
        await asyncio.to_thread(one_server.start)
        await early


async def test_a_server_that_hangs_costs_a_call_its_deadline_and_later_calls_work(server: RealServer) -> None:
    async with RedisTokenSink(server.url, **SETTINGS | {"timeout_s": 0.5}) as hasty:
        await hasty.begin_call("r", "before")
        server.pause()
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcomes = await asyncio.gather(
                    *(hasty.begin_call("r", f"c{number}") for number in range(CALLERS)),
                    hasty.put(sample_entry("r", "before")),
                    hasty.mark_incomplete("s"),
                    return_exceptions=True,
                )
        finally:
            server.resume()
        assert {type(outcome) for outcome in outcomes} == {BackendUnavailableError}
        assert all("no answer within 0.5 s" in str(outcome) for outcome in outcomes)
        await until_it_works(lambda: hasty.put(sample_entry("r", "before")))
        await until_it_works(lambda: hasty.put(sample_entry("after", "c")))
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        (entry,) = (await source.freeze("after")).entries
        assert exact_dump(entry) == exact_dump(sample_entry("after", "c"))
        assert "before" in {entry.model_call_id for entry in (await source.freeze("r")).entries}


async def test_closing_ends_though_the_server_takes_no_bytes(one_server: RealServer) -> None:
    sink = RedisTokenSink(one_server.url, **SETTINGS | {"timeout_s": 0.5})
    await sink.begin_call("r", "c")
    one_server.pause()
    try:
        with pytest.raises(BackendUnavailableError):
            await sink.put(sample_entry("r", "c", note="x" * 2**24))
        async with asyncio.timeout(5):
            await sink.close()
    finally:
        one_server.resume()


async def test_a_connection_that_takes_no_bytes_is_given_up_at_the_deadline(one_server: RealServer) -> None:
    async with StallingProxy(one_server.socket_path) as proxy:
        sink = RedisTokenSink(proxy.url, **SETTINGS | {"timeout_s": 0.5, "connections": 1})
        await sink.begin_call("r", "c")
        await sink.put(sample_entry("r", "large", note="x" * 2**20))  # it has a connection of its own
        proxy.stall()
        with pytest.raises(BackendUnavailableError):
            await sink.put(sample_entry("r", "c", note="x" * 2**24))
        # The address works again; only the old connection is dead.
        await until_it_works_within_calls(sink, calls=4)
        async with asyncio.timeout(5):
            await sink.close()


async def until_it_works_within_calls(sink: RedisTokenSink, calls: int) -> None:
    errors = []
    for number in range(calls):
        try:
            await sink.begin_call("r", f"later{number}")
        except BackendUnavailableError as error:
            errors.append(error)
        else:
            return
    pytest.fail(f"the connection is still held after {calls} deadlines: {errors}")


# A server that dies, connections that are cut


async def write_and_collect(sink: RedisTokenSink, acknowledged: list[str], enough: asyncio.Event) -> None:
    async def write(worker: int) -> None:
        for number in range(10):
            call = f"c{worker}.{number}"
            await sink.begin_call("r", call)
            await sink.put(sample_entry("r", call))
            acknowledged.append(call)
            if len(acknowledged) >= CALLERS * 2:
                enough.set()

    async with asyncio.TaskGroup() as group:
        for worker in range(CALLERS):
            group.create_task(write(worker))


async def all_are_there(server: RealServer, acknowledged: list[str]) -> None:
    assert len(acknowledged) == CALLERS * 10
    async with RedisTokenSource(server.url, **SETTINGS) as source:
        snapshot = await source.freeze("r")
    assert {entry.model_call_id for entry in snapshot.entries} == set(acknowledged)
    assert not snapshot.incomplete, snapshot.reasons
    assert all(
        exact_dump(entry) == exact_dump(sample_entry("r", entry.model_call_id)) for entry in snapshot.entries
    )


async def test_a_server_killed_among_64_writers_loses_nothing_acknowledged(server: RealServer) -> None:
    acknowledged: list[str] = []
    enough = asyncio.Event()
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        writers = asyncio.create_task(write_and_collect(sink, acknowledged, enough))
        await enough.wait()
        before = list(acknowledged)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        with server.client() as client:
            stored = {
                name[2:].decode() for name in client.hkeys(rollout_key("run", "r")) if name[:2] == b"r:"
            }
        assert set(before) <= stored
        await writers
    await all_are_there(server, acknowledged)


async def test_connections_cut_again_and_again_lose_nothing(server: RealServer) -> None:
    acknowledged: list[str] = []
    enough = asyncio.Event()

    def cut() -> int:
        with server.client() as client:
            return int(client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))

    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        writers = asyncio.create_task(write_and_collect(sink, acknowledged, enough))
        cuts = 0
        while not writers.done():
            cuts += await asyncio.to_thread(cut)
            await asyncio.sleep(0.005)  # between two cuts; writers must get somewhere
        await writers
        assert cuts > 0
    await all_are_there(server, acknowledged)


async def test_scripts_flushed_at_any_time_are_sent_again(server: RealServer) -> None:
    acknowledged: list[str] = []
    enough = asyncio.Event()

    def flush() -> None:
        with server.client() as client:
            client.script_flush()

    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        flush()
        writers = asyncio.create_task(write_and_collect(sink, acknowledged, enough))
        while not writers.done():
            await asyncio.to_thread(flush)
            await asyncio.sleep(0.005)
        await writers
    await all_are_there(server, acknowledged)


async def test_a_server_that_came_back_empty_refuses_what_was_announced_to_it_before(
    one_server: RealServer,
) -> None:
    async with RedisTokenSink(one_server.url, **SETTINGS) as sink:
        await sink.begin_call("r", "c")
        with one_server.client() as client:
            client.flushall()
        with pytest.raises(TokenCaptureRetiredError):
            await sink.put(sample_entry("r", "c"))
