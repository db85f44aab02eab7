"""Receives a long value straight into its place, where a stream reader and a parser would copy it four times.

What is no long value is left to them.
"""

from __future__ import annotations

import asyncio
import re

import numpy as np

_LINE_BYTES = 4096
"""Room for the line that tells the length, and what comes with it. A value that fits is not long."""

_LENGTH_LINE = re.compile(rb"\$(\d{1,10})\r\n")
_MOST_LINE_BYTES = 13
_END = b"\r\n"


class LongValue(asyncio.BufferedProtocol):
    """Stands in for the protocol of a transport until the next reply is here.

    ``reply`` ends with the value, or with None for any other reply: the protocol that was there before gets
    that. Before, no reply may be under way. Whoever does not wait for the end must close the transport.
    """

    def __init__(self, transport: asyncio.Transport, *, max_bytes: int) -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        before = transport.get_protocol()
        if not isinstance(before, asyncio.Protocol):
            raise TypeError(f"{type(before).__name__} could not take over again")
        self._before = before
        self._room = memoryview(bytearray(_LINE_BYTES))
        self._filled = 0
        self._length: int | None = None
        self.reply: asyncio.Future[memoryview | None] = asyncio.get_running_loop().create_future()
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the protocol's signature
        """Where to put what comes."""
        return self._room[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So much of it was filled."""
        self._filled += nbytes
        if self._length is None:
            self._read_length()
        elif self._filled == len(self._room):
            if self._room[self._length :] == _END:
                self._end(self._room[: self._length])
            else:
                self._leave()

    def eof_received(self) -> bool | None:
        """End: there is no more to come."""
        self._leave()
        return self._before.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """End: there is no more to come."""
        self._leave()
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        """The writer is the other protocol's."""
        self._before.pause_writing()

    def resume_writing(self) -> None:
        """The writer is the other protocol's."""
        self._before.resume_writing()

    def _read_length(self) -> None:
        line = _LENGTH_LINE.match(self._room)
        if line is None:
            if self._filled >= _MOST_LINE_BYTES or self._room[0] != ord("$"):
                self._leave()
            return
        length = int(line[1])
        begun = self._room[line.end() : self._filled]
        if not _LINE_BYTES <= length <= self._max_bytes:
            self._leave()
            return
        self._length = length
        # Not zeroed first, as a bytearray would be.
        self._room = np.empty(length + len(_END), np.uint8).data
        self._room[: len(begun)] = begun
        self._filled = len(begun)

    def _leave(self) -> None:
        """Leave the reply to the protocol that was there before."""
        received = bytes(self._room[: self._filled])
        if self._length is not None:
            received = b"$%d\r\n" % self._length + received
        self._end(None)
        if received:
            self._before.data_received(received)

    def _end(self, value: memoryview | None) -> None:
        self._room, self._filled, self._length = memoryview(b""), 0, None
        self._transport.set_protocol(self._before)
        if not self.reply.done():
            self.reply.set_result(value)
