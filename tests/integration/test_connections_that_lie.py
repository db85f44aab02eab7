"""Connections that answer too much, something else, or nothing: no caller ever gets another one's answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.proxies import READ_BYTES, Proxy, StallingProxy
from support.sample_entries import exact_dump, sample_entry
from support.servers import RealServer

from gym_capture_redis.protocols import IncompleteCode
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

PATIENCE_S = 30.0
PUTS = 40

ECHO_BYTES = len(b"$8\r\n12345678\r\n")
"""The reply to the ECHO that ends every pipeline."""

EXTRA_REPLIES = [b":12\r\n", b"+OK\r\n", b"-ERR x\r\n", b"*0\r\n", b"$-1\r\n"]
OTHER_REPLIES = [
    b":12\r\n",
    b"+OK\r\n",
    b"$2\r\nOK\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*1\r\n$2\r\nOK\r\n",
    b"*4\r\n:1\r\n:2\r\n:3\r\n:4\r\n",
    b"*4\r\n$2\r\nOK\r\n$1\r\na\r\n$1\r\nx\r\n:1\r\n",
    b"*1\r\n*2\r\n$5\r\nERROR\r\n:1\r\n",
    b"*1\r\n*2\r\n$5\r\nERROR\r\n$-1\r\n",
    b"*1\r\n*4\r\n$2\r\nOK\r\n$1\r\na\r\n$1\r\nx\r\n:1\r\n",
    b"*2\r\n*0\r\n*0\r\n",
    b"?\r\n",
    b"$9999999\r\nnever all of it",
]


class LyingProxy(Proxy):
    """Between a client and a server's unix socket: once, it adds a reply or gives another one instead.

    From the lie on, true replies come a little late: as they do where a reply too many goes unnoticed.
    """

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self._lie = b""
        self._instead = False
        self._delay_s = 0.0
        self.connections = 0

    @property
    def has_lied(self) -> bool:
        return self._delay_s > 0 and not self._lie

    def add(self, reply: bytes) -> None:
        self._lie, self._instead, self._delay_s = reply, False, 0.02

    def replace(self, reply: bytes) -> None:
        self._lie, self._instead, self._delay_s = reply, True, 0.02

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_unix_connection(str(self.socket_path))
        pumps = (self._up(reader, server_writer), self._down(server_reader, writer))
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                writer.write(data)
        finally:
            writer.transport.abort()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(READ_BYTES):
                lie, self._lie = self._lie, b""
                writer.write(lie)
                await asyncio.sleep(self._delay_s)
                writer.write(data[-ECHO_BYTES:] if lie and self._instead else data)
        finally:
            writer.transport.abort()


@pytest.fixture
async def proxy(real_server: RealServer) -> AsyncIterator[LyingProxy]:
    async with LyingProxy(real_server.socket_path) as running:
        yield running


@pytest.fixture
async def direct_sink(real_server: RealServer, namespace: str) -> AsyncIterator[RedisTokenSink]:
    async with RedisTokenSink(real_server.url, namespace=namespace) as sink:
        yield sink


@pytest.fixture
async def source(proxy: LyingProxy, namespace: str) -> AsyncIterator[RedisTokenSource]:
    """A source with one connection, which goes through the proxy and is in use already."""
    settings: dict[str, Any] = {"timeout_s": 8, "connections": 1}
    async with RedisTokenSource(proxy.url, namespace=namespace, **settings) as made:
        for _ in range(2):
            await made.freeze("warm")
        yield made


# One reply too many


@pytest.mark.parametrize("extra", EXTRA_REPLIES)
async def test_after_an_extra_reply_every_freeze_still_gives_its_own_rollout(
    direct_sink: RedisTokenSink, source: RedisTokenSource, proxy: LyingProxy, extra: bytes
) -> None:
    for number in range(3):
        await direct_sink.begin_call(f"lost{number}", "open")
        await direct_sink.put(sample_entry(f"whole{number}", f"c{number}"))
    proxy.add(extra)
    await source.freeze("warm")
    assert proxy.has_lied
    for number in range(3):
        empty, lost, whole = [await source.freeze(f"{kind}{number}") for kind in ("empty", "lost", "whole")]
        assert (len(empty.entries), empty.incomplete) == (0, False)
        assert [(reason.code, reason.model_call_id) for reason in lost.reasons] == [
            (IncompleteCode.LOST_CALL, "open")
        ]
        assert [exact_dump(entry) for entry in whole.entries] == [
            exact_dump(sample_entry(f"whole{number}", f"c{number}"))
        ]
    assert proxy.connections == 2, "the connection that lied must be given up, and no other"


@pytest.mark.parametrize("extra", EXTRA_REPLIES)
async def test_an_extra_reply_among_many_callers_gives_none_of_them_anothers_answer(
    direct_sink: RedisTokenSink, source: RedisTokenSource, proxy: LyingProxy, extra: bytes
) -> None:
    rollouts = [f"r{number}" for number in range(20)]
    for rollout in rollouts:
        await direct_sink.begin_call(rollout, rollout)
    proxy.add(extra)
    snapshots = await asyncio.gather(*(source.freeze(rollout) for rollout in rollouts))
    assert proxy.has_lied
    assert [[reason.model_call_id for reason in snapshot.reasons] for snapshot in snapshots] == [
        [rollout] for rollout in rollouts
    ]


@pytest.mark.parametrize("extra", EXTRA_REPLIES)
async def test_a_sink_stores_each_record_once_though_a_reply_too_many_came(
    real_server: RealServer, namespace: str, proxy: LyingProxy, extra: bytes
) -> None:
    settings: dict[str, Any] = {"namespace": namespace, "timeout_s": PATIENCE_S}
    async with (
        RedisTokenSink(proxy.url, **settings, connections=1) as sink,
        RedisTokenSource(real_server.url, **settings) as source,
    ):
        await sink.begin_call("r", "warm")
        proxy.add(extra)
        await asyncio.gather(*(sink.put(sample_entry("r", f"c{number}")) for number in range(5)))
        await sink.put(sample_entry("r", "warm"))
        assert proxy.has_lied
        snapshot = await source.freeze("r")
        assert {entry.model_call_id for entry in snapshot.entries} == {"warm", *(f"c{n}" for n in range(5))}
        assert not snapshot.incomplete


# Another reply instead


@pytest.mark.parametrize("reply", OTHER_REPLIES)
async def test_a_reply_of_unknown_form_is_asked_for_again_on_a_new_connection(
    direct_sink: RedisTokenSink, source: RedisTokenSource, proxy: LyingProxy, reply: bytes
) -> None:
    await direct_sink.begin_call("lost", "open")
    proxy.replace(reply)
    snapshot = await source.freeze("lost")
    assert proxy.has_lied
    assert [reason.code for reason in snapshot.reasons] == [IncompleteCode.LOST_CALL]
    assert proxy.connections == 2


# No reply


async def test_what_is_in_flight_when_connections_fall_silent_succeeds_on_new_ones(
    valkey9: RealServer, namespace: str
) -> None:
    settings: dict[str, Any] = {"namespace": namespace, "timeout_s": 8}
    async with (
        StallingProxy(valkey9.socket_path) as proxy,
        RedisTokenSink(proxy.url, **settings) as sink,
        RedisTokenSource(valkey9.url, **settings) as source,
    ):
        await asyncio.gather(*(sink.begin_call("r", f"c{number}") for number in range(PUTS)))
        await sink.mark_incomplete("other", "first")
        proxy.stall()
        await asyncio.gather(
            *(sink.put(sample_entry("r", f"c{number}")) for number in range(PUTS)),
            sink.mark_incomplete("other", "second"),
        )
        snapshot = await source.freeze("r")
        assert (len(snapshot.entries), snapshot.incomplete) == (PUTS, False)
        marked = await source.freeze("other")
        assert {reason.model_call_id for reason in marked.reasons} == {"first", "second"}


async def test_a_mark_and_a_refusal_do_not_wait_behind_puts_that_hang(
    valkey9: RealServer, namespace: str
) -> None:
    async with (
        StallingProxy(valkey9.socket_path) as proxy,
        RedisTokenSink(proxy.url, namespace=namespace, timeout_s=4 * PATIENCE_S, connections=1) as sink,
    ):
        await asyncio.gather(*(sink.begin_call("r", f"c{number}") for number in range(PUTS)))
        proxy.stall()
        puts = [asyncio.create_task(sink.put(sample_entry("r", f"c{number}"))) for number in range(PUTS)]
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S / 2):
            await sink.mark_incomplete("r", "lost")
            await sink.record_engine_refusal("r", model_call_id="refused", code="full")
        assert not any(put.done() for put in puts)
        for put in puts:
            put.cancel()
        assert {type(outcome) for outcome in await asyncio.gather(*puts, return_exceptions=True)} == {
            asyncio.CancelledError
        }
