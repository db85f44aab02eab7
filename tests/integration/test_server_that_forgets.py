"""A server that comes back without acknowledged steps must not make a rollout look complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
from support.forgetting import aof_size, come_back_empty, come_back_short, restart
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis import scripts, writer
from gym_capture_redis.errors import BackendUnavailableError, TokenCaptureRetiredError
from gym_capture_redis.healing import Healer
from gym_capture_redis.keys import new_mark_id
from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

PATIENCE_S = 30.0
SETTINGS: dict[str, Any] = {"namespace": "run", "timeout_s": PATIENCE_S}
SOURCE_SETTINGS = {**SETTINGS, "settle_s": 0.05}
"""Does not wait for what may come back."""

Step = Callable[[RedisTokenSink], Awaitable[None]]


async def capture(sink: RedisTokenSink, *calls: str, rollout: str = "r") -> None:
    for call in calls:
        await sink.begin_call(rollout, call)
        await sink.put(sample_entry(rollout, call))


async def reasons(server: RealServer, rollout: str = "r") -> list[tuple[str, str]]:
    async with RedisTokenSource(server.url, **SOURCE_SETTINGS) as source:
        return [(reason.code, reason.model_call_id) for reason in (await source.freeze(rollout)).reasons]


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def begin_and_put(sink: RedisTokenSink) -> None:
    await capture(sink, "third")


async def put_unannounced(sink: RedisTokenSink) -> None:
    await sink.put(sample_entry("r", "third"))


async def capture_a_call_again(sink: RedisTokenSink) -> None:
    await capture(sink, "first")


@pytest.mark.parametrize("step", [begin_and_put, put_unannounced, capture_a_call_again])
async def test_a_server_that_comes_back_empty_makes_the_rollout_incomplete_at_the_next_step(
    server: RealServer, caplog: pytest.LogCaptureFixture, step: Step
) -> None:
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        await capture(sink, "first", "second")
        await asyncio.to_thread(come_back_empty, server)
        await step(sink)
    assert await reasons(server) == [(IncompleteCode.LOST_STEPS, "")]
    (message,) = errors_in(caplog)
    assert "Rollout r" in message
    assert "came back without steps that were acknowledged" in message


async def test_a_call_announced_before_the_loss_is_refused_and_can_be_marked(server: RealServer) -> None:
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        await capture(sink, "first")
        await sink.begin_call("r", "second")
        await asyncio.to_thread(come_back_empty, server)
        with pytest.raises(TokenCaptureRetiredError):
            await sink.put(sample_entry("r", "second"))
        await sink.mark_incomplete("r", "second")
    assert sorted(await reasons(server)) == [
        (IncompleteCode.LOST_STEPS, ""),
        (IncompleteCode.MARKED, "second"),
    ]


async def test_a_loss_that_cannot_be_marked_fails_the_next_step_and_is_marked_before_the_one_after(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(*_: object, **__: object) -> None:
        raise BackendUnavailableError("not now")

    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        await capture(sink, "first")
        await asyncio.to_thread(come_back_empty, server)
        with monkeypatch.context() as broken:
            broken.setattr(scripts, "heal", unavailable)
            with pytest.raises(BackendUnavailableError):
                await sink.begin_call("r", "second")
        await capture(sink, "second")
    assert await reasons(server) == [(IncompleteCode.LOST_STEPS, "")]


async def test_steps_that_are_not_kept_any_more_are_noticed_by_their_number(
    server: RealServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with RedisTokenSink(server.url, **SETTINGS, max_recent_bytes=0) as sink:
        await capture(sink, "first")
        size = aof_size(server)
        await capture(sink, "second")
        await asyncio.to_thread(come_back_short, server, size)
        await sink.put(sample_entry("r", "third"))
    assert await reasons(server) == [(IncompleteCode.LOST_STEPS, "")]
    assert errors_in(caplog) == []  # another worker may still put them back


@pytest.fixture
def newest_rollouts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that meeting the server shows nothing of the older ones."""

    async def has_kept(*_: Any) -> bool:
        return True

    monkeypatch.setattr(Healer, "_has_kept", has_kept)


@pytest.mark.usefixtures("newest_rollouts_are_there")
@pytest.mark.parametrize("late", [begin_and_put, put_unannounced])
async def test_what_was_safe_long_ago_and_is_gone_all_the_same_is_marked_by_the_next_step(
    server: RealServer, caplog: pytest.LogCaptureFixture, late: Step
) -> None:
    async with RedisTokenSink(server.url, **SETTINGS, settle_s=0.01) as sink:
        await capture(sink, "first", "second")
        await asyncio.sleep(0.02)
        await sink.begin_call("other", "call")  # an answer that is later than settle_s
        await asyncio.to_thread(come_back_empty, server)
        await late(sink)
    assert await reasons(server) == [(IncompleteCode.LOST_STEPS, "")]
    assert any("Rollout r" in message for message in errors_in(caplog))


@pytest.mark.usefixtures("newest_rollouts_are_there")
async def test_a_step_whose_loss_could_not_be_marked_is_not_said_to_be_unsent(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_before_the_mark() -> str:
        server.kill()
        return new_mark_id()

    async with RedisTokenSink(server.url, namespace="run", timeout_s=1.0, settle_s=0.01) as sink:
        await capture(sink, "first")
        size = await asyncio.to_thread(aof_size, server)
        await capture(sink, "second")
        await asyncio.sleep(0.02)
        await sink.begin_call("other", "call")  # an answer that is later than settle_s
        await asyncio.to_thread(come_back_short, server, size)
        monkeypatch.setattr(writer, "new_mark_id", kill_before_the_mark)
        with pytest.raises(BackendUnavailableError, match="may or may not have been applied"):
            await sink.put(sample_entry("r", "third"))


@pytest.mark.parametrize("delete_first", [True, False])
async def test_on_the_same_server_a_deleted_id_begins_again_unmarked(
    real_server: RealServer, namespace: str, caplog: pytest.LogCaptureFixture, delete_first: bool
) -> None:
    async with (
        RedisTokenSink(real_server.url, namespace=namespace) as sink,
        RedisTokenSource(real_server.url, namespace=namespace) as source,
    ):
        await capture(sink, "first", "second")
        if delete_first:
            await source.delete(["r"])
        await capture(sink, "first")
        snapshot = await source.freeze("r")
        assert (len(snapshot.entries), snapshot.incomplete) == (1 if delete_first else 2, False)
    assert errors_in(caplog) == []


# A server that is not ready yet


async def until_it_says(server: RealServer, field: str, value: int) -> None:
    """Poll INFO of a server that may not listen yet."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                with server.client() as client:
                    info: Any = client.info("persistence")
            except redis.ConnectionError:
                info = {}
            if info.get(field) == value:
                return
            await asyncio.sleep(0.005)


def fill(server: RealServer, keys: int) -> None:
    with server.client() as client:
        pipe = client.pipeline(transaction=False)
        for number in range(keys):
            pipe.set(f"other{number}", "v")
        pipe.execute()


async def test_a_server_that_loads_its_data_is_waited_for(server: RealServer) -> None:
    async with RedisTokenSink(server.url, **SETTINGS) as sink:
        await sink.begin_call("r", "first")
        fill(server, 6_000)
        server.kill()
        server.config["key-load-delay"] = "1"  # microseconds for each key, and what it costs to sleep at all
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await until_it_says(server, "loading", 1)
        await asyncio.gather(
            sink.put(sample_entry("r", "first")),
            sink.begin_call("r", "second"),
            sink.mark_incomplete("other", "lost"),
        )
        await starting
    assert await reasons(server) == [(IncompleteCode.LOST_CALL, "second")]
    assert await reasons(server, "other") == [(IncompleteCode.MARKED, "lost")]


async def test_a_server_that_writes_its_first_append_only_file_is_waited_for(
    real_server: RealServer,
) -> None:
    # Microseconds for each key: the child that writes the file takes half a second.
    with RealServer(real_server.binary, appendonly="no", rdb_key_save_delay="10000") as server:
        fill(server, 50)
        with server.client() as client:
            client.config_set("appendonly", "yes")
            before: Any = client.info("persistence")
            assert before["aof_rewrite_in_progress"] == 1
            async with RedisTokenSink(server.url, **SETTINGS) as sink:
                await capture(sink, "first")
            after: Any = client.info("persistence")
            assert (before["aof_base_size"], after["aof_rewrite_in_progress"]) == (0, 0)
            assert after["aof_base_size"] > 0
        # While it waits for a slow fsync it acknowledges what it has not written (design, "Durability").
        await until_it_says(server, "aof_buffer_length", 0)
        server.config["appendonly"] = "yes"
        await asyncio.to_thread(restart, server)
        assert await reasons(server) == []
