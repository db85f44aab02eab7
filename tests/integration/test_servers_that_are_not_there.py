"""A connection that is refused at once ends at the deadline too, and neither spins nor hangs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis import scripts
from gym_capture_redis.connection import Link
from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

TIMEOUT_S = 0.3
PATIENCE_S = 30.0


def missing_socket(directory: Path) -> str:
    return f"unix://{directory / 'missing.sock'}"


def stale_socket(directory: Path) -> str:
    """What a server leaves behind that was killed."""
    path = directory / "stale.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return f"unix://{path}"


def closed_port(_: Path) -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"redis://127.0.0.1:{server.getsockname()[1]}"


async def put(url: str) -> None:
    async with RedisTokenSink(url, timeout_s=TIMEOUT_S) as sink:
        await sink.put(sample_entry(routed_experts=None))  # with them, a thread would be needed in time


async def announce(url: str) -> None:
    async with RedisTokenSink(url, timeout_s=TIMEOUT_S) as sink:
        await sink.begin_call("rollout", "call")


async def mark(url: str) -> None:
    async with RedisTokenSink(url, timeout_s=TIMEOUT_S) as sink:
        await sink.mark_incomplete("rollout", "call")


async def freeze(url: str) -> None:
    async with RedisTokenSource(url, timeout_s=TIMEOUT_S) as source:
        await source.freeze("rollout")


async def freeze_many(url: str) -> None:
    async with RedisTokenSource(url, timeout_s=TIMEOUT_S) as source:
        async for outcome in source.freeze_many(["one", "two"]):
            assert outcome.snapshot is None
            if outcome.error is not None:
                raise outcome.error


@pytest.mark.parametrize("call", [put, announce, mark, freeze, freeze_many])
@pytest.mark.parametrize("server", [missing_socket, stale_socket, closed_port])
async def test_a_call_to_a_server_that_is_not_there_ends_with_what_was_met(
    server: Callable[[Path], str], call: Callable[[str], Awaitable[None]], tmp_path: Path
) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BackendUnavailableError, match=r"within 0\.3 s \(last: ConnectionError") as raised:
            await call(server(tmp_path))
    assert str(raised.value).endswith("was not sent, nothing changed")


async def test_a_put_ends_when_its_server_has_gone_with_its_socket(tmp_path: Path) -> None:
    url = stale_socket(tmp_path)
    async with RedisTokenSink(url, timeout_s=TIMEOUT_S) as sink:
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(BackendUnavailableError):
                    await sink.put(sample_entry())
        (tmp_path / "stale.sock").unlink()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BackendUnavailableError):
                await sink.put(sample_entry())


async def test_a_freeze_that_ends_while_it_reads_is_not_said_to_have_changed_nothing(
    valkey9: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = scripts.read

    async def is_as_before(_: Link) -> bool:
        return False  # as the first answer after a while may tell

    def read_too_late(*args: Any, **names: Any) -> scripts.Call:
        server.kill()
        return read(*args, **names)

    with RealServer(valkey9.binary) as server:
        async with RedisTokenSink(server.url) as sink:
            await sink.put(sample_entry("rollout", "first"))
            await sink.put(sample_entry("rollout", "second"))
            async with RedisTokenSource(server.url, timeout_s=1.0, settle_s=0.05, chunk_bytes=1) as source:
                monkeypatch.setattr(scripts, "read", read_too_late)
                monkeypatch.setattr(Link, "is_as_before", is_as_before)
                with pytest.raises(BackendUnavailableError, match="may or may not have been applied"):
                    await source.freeze("rollout")
