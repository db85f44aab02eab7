"""TCP proxies in front of a server's unix socket, for connections that do not do what they should."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Self

READ_BYTES = 2**16


class Proxy:
    """Listens on a free port. A subclass says in ``serve`` what becomes of a connection."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        await asyncio.sleep(0)  # aborted transports close their sockets in the next step of the loop

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self.serve(reader, writer)))


class StallingProxy(Proxy):
    """Can forget its connections, as a host does that loses its power: no reset, no reply."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self._flowing = asyncio.Event()
        self._flowing.set()

    def stall(self) -> None:
        """Pass nothing on for the connections of now; those to come are served."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flowing = self._flowing
        server_reader, server_writer = await asyncio.open_unix_connection(str(self.socket_path))
        pumps = [
            asyncio.ensure_future(_pump(reader, server_writer, flowing)),
            asyncio.ensure_future(_pump(server_reader, writer, flowing)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (writer, server_writer):
                end.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
    while True:
        await flowing.wait()
        data = await reader.read(READ_BYTES)
        await flowing.wait()
        if not data:
            return
        writer.write(data)
        await writer.drain()


class FaultyProxy(Proxy):
    """Does to what passes what a bad network does; its attributes may be changed at any time.

    ``slice_bytes``: messages are passed on in pieces of this size. ``longest_delay_s``: each piece waits for
    a random time up to this one.
    """

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self.slice_bytes = READ_BYTES
        self.longest_delay_s = 0.0
        self.held = asyncio.Event()
        """Whether a message that was to be held is held."""
        self.swallowed = 0
        self._swallow = False
        self._flows: set[_Flow] = set()
        self._marker: bytes | None = None
        self._holds_request = False

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        flows, self._flows = self._flows, set()
        for flow in flows:
            flow.reset()
        return len(flows)

    def swallow_a_reply(self) -> None:
        """Pass on the next request, and cut its connection when it is answered, before anybody hears."""
        self._swallow = True

    def hold_at(self, marker: bytes) -> None:
        """Pass on a request up to and with these bytes, and nothing after them on its connection."""
        self._marker, self._holds_request = marker, True

    def hold_reply_to(self, marker: bytes) -> None:
        """Hold the reply to a request with these bytes in it: the server has done it, and nobody hears.

        The server must know the script already; else what is held says only that it does not.
        """
        self._marker, self._holds_request = marker, False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(str(self.socket_path))
        except OSError:  # the server is away
            writer.transport.abort()
            return
        flow = _Flow(writer, server_writer)
        self._flows.add(flow)
        pumps = [
            asyncio.ensure_future(self._up(flow, reader)),
            asyncio.ensure_future(self._down(flow, server_reader)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._flows.discard(flow)
            flow.reset()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _up(self, flow: _Flow, reader: asyncio.StreamReader) -> None:
        tail = b""
        while data := await reader.read(READ_BYTES):
            if self._swallow:
                self._swallow, flow.swallows = False, True
            if self._marker is not None and (found := (tail + data).find(self._marker)) >= 0:
                end = found + len(self._marker) - len(tail)
                self._marker, flow.holds = None, True
                if self._holds_request:
                    await self._pass(flow.server, data[:end])
                    self.held.set()
                    await asyncio.Event().wait()  # until the connection is cut
            tail = (tail + data)[-len(self._marker) :] if self._marker else b""
            await self._pass(flow.server, data)

    async def _down(self, flow: _Flow, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(READ_BYTES):
            if flow.swallows:
                self.swallowed += 1
                return
            if flow.holds:
                self.held.set()
                await asyncio.Event().wait()  # until the connection is cut
            await self._pass(flow.client, data)

    async def _pass(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for start in range(0, len(data), self.slice_bytes):
            await asyncio.sleep(random.uniform(0, self.longest_delay_s))
            writer.write(data[start : start + self.slice_bytes])
            await writer.drain()


class _Flow:
    """One connection of a client, and the one to the server behind it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.swallows = False
        self.holds = False

    def reset(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()
