"""TCP proxies in front of a server's unix socket, for connections that do not do what they should."""

from __future__ import annotations

import asyncio
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
