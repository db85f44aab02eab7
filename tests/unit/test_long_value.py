"""A long value goes straight into its place; whatever else comes is left to the reader that was before."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gym_capture_redis.long_value import LongValue

PATIENCE_S = 30.0
MOST = 2**20
LONG = random.Random(1).randbytes(300_000)
ECHO = b"$8\r\n12345678\r\n"

pytestmark = pytest.mark.filterwarnings("error")


@dataclass
class Line:
    """A connection with a stream reader, as redis-py's, and its other end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    other: socket.socket

    @property
    def transport(self) -> asyncio.Transport:
        transport = self.writer.transport
        assert isinstance(transport, asyncio.Transport)
        return transport

    def begin(self, max_bytes: int = MOST) -> LongValue:
        return LongValue(self.transport, max_bytes=max_bytes)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.other, data)


@asynccontextmanager
async def line_between() -> AsyncIterator[Line]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    async with asyncio.timeout(PATIENCE_S):
        yield Line(reader, writer, theirs)
    theirs.close()
    writer.close()


def reply_of(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


@pytest.mark.parametrize("length", [4096, 4097, 65_536, len(LONG)])
async def test_a_long_value_comes_whole_and_what_follows_is_the_readers(length: int) -> None:
    async with line_between() as line:
        before = line.transport.get_protocol()
        value = line.begin()
        sending = asyncio.create_task(line.send(reply_of(LONG[:length]) + ECHO))
        received = await value.reply
        assert received is not None
        assert bytes(received) == LONG[:length]
        assert line.transport.get_protocol() is before
        assert await line.reader.readexactly(len(ECHO)) == ECHO
        await sending


@pytest.mark.parametrize("cut", [*range(1, 12), 4000, 5000, 299_999, 300_008, 300_009, 300_010])
async def test_it_may_come_in_any_pieces(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    updated = LongValue.buffer_updated
    has_come = asyncio.Event()

    def counted(value: LongValue, nbytes: int) -> None:
        pieces.append(nbytes)
        updated(value, nbytes)
        if sum(pieces) >= cut:
            has_come.set()

    monkeypatch.setattr(LongValue, "buffer_updated", counted)
    async with line_between() as line:
        value = line.begin()
        whole = reply_of(LONG)
        await line.send(whole[:cut])
        await has_come.wait()
        sending = asyncio.create_task(line.send(whole[cut:]))
        received = await value.reply
        assert received is not None
        assert bytes(received) == LONG
        await sending


async def test_several_come_one_after_another() -> None:
    values = [LONG[start:] for start in range(0, 200_000, 50_000)]
    async with line_between() as line:
        sending = asyncio.create_task(line.send(b"".join(map(reply_of, values)) + ECHO))
        for expected in values:
            received = await line.begin().reply
            assert received is not None
            assert bytes(received) == expected
        assert await line.reader.readexactly(len(ECHO)) == ECHO
        await sending


@pytest.mark.parametrize(
    "reply",
    [
        b"$-1\r\n",
        b"-MOVED 1 127.0.0.1:7000\r\n",
        b":12\r\n",
        b"*2\r\n:1\r\n:2\r\n",
        b"$12345678901234\r\n",
        b"$300000 bytes\r\n",
        reply_of(b""),
        reply_of(b"short"),
        reply_of(LONG[:4095]),
    ],
    ids=lambda reply: repr(reply[:12]),
)
async def test_any_other_reply_is_left_to_the_reader_whole(reply: bytes) -> None:
    async with line_between() as line:
        before = line.transport.get_protocol()
        value = line.begin()
        await line.send(reply + ECHO)
        assert await value.reply is None
        assert line.transport.get_protocol() is before
        assert await line.reader.readexactly(len(reply + ECHO)) == reply + ECHO


async def test_a_value_above_the_bound_is_left_to_the_reader_whole() -> None:
    async with line_between() as line:
        value = line.begin(max_bytes=len(LONG) - 1)
        sending = asyncio.create_task(line.send(reply_of(LONG)))
        assert await value.reply is None
        assert await line.reader.readexactly(len(reply_of(LONG))) == reply_of(LONG)
        await sending


async def test_a_value_that_does_not_end_where_it_should_is_left_to_the_reader_whole() -> None:
    wrong = reply_of(LONG)[:-2] + b"no"
    async with line_between() as line:
        value = line.begin()
        sending = asyncio.create_task(line.send(wrong + ECHO))
        assert await value.reply is None
        assert await line.reader.readexactly(len(wrong + ECHO)) == wrong + ECHO
        await sending


@pytest.mark.parametrize("sent", [0, 3, 200_000])
async def test_a_connection_that_ends_is_the_readers_to_tell(sent: int) -> None:
    async with line_between() as line:
        value = line.begin()
        sending = asyncio.create_task(line.send(reply_of(LONG)[:sent]))
        await sending
        line.other.close()
        assert await value.reply is None
        with pytest.raises(asyncio.IncompleteReadError) as error:
            await line.reader.readexactly(len(LONG) + 100)
        assert error.value.partial == reply_of(LONG)[:sent]


async def test_an_aborted_connection_ends_the_wait() -> None:
    async with line_between() as line:
        value = line.begin()
        line.transport.abort()
        assert await value.reply is None
        assert await line.reader.read() == b""


async def test_who_left_is_not_told() -> None:
    async with line_between() as line:
        value = line.begin()
        value.reply.cancel()
        await line.send(reply_of(b"short"))
        assert await line.reader.readexactly(len(reply_of(b"short"))) == reply_of(b"short")


async def test_the_writer_waits_for_a_full_connection_meanwhile() -> None:
    async with line_between() as line:
        value = line.begin()
        line.writer.write(bytes(2**23))
        draining = asyncio.create_task(line.writer.drain())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not draining.done()
        loop, left = asyncio.get_running_loop(), 2**23
        while left:
            left -= len(await loop.sock_recv(line.other, 2**20))
        await draining
        await line.send(reply_of(b"short"))
        assert await value.reply is None


async def test_a_protocol_that_could_not_take_over_again_is_refused() -> None:
    async with line_between() as line:
        first = line.begin()
        with pytest.raises(TypeError, match="LongValue could not take over"):
            line.begin()
        await line.send(ECHO)
        assert await first.reply is None
