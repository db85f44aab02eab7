"""Connections of redis-py, verified every time they connect.

The only module that knows redis-py's connections; which exceptions mean what is in ``faults.py``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from redis import exceptions as redis_errors
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gym_capture_redis.long_value import LongValue
from gym_capture_redis.parts import PART_BYTES
from gym_capture_redis.scripts import Argument, Dialect
from gym_capture_redis.searches import ASK_TIMEOUT_S, Search
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ServerSettings
from gym_capture_redis.wire import (
    QUESTIONS,
    Pipeline,
    Terms,
    agree,
    fake_server,
    options_of,
    pack_command,
    read_facts,
    user_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gym_capture_redis.embedded import EmbeddedServer

T = TypeVar("T")

_TRUSTED_S = 1.0
"""How long an idle connection leads to the same server for sure: a failover and one back take longer."""


class Link:
    """One connection to a server, given by address or path of its socket. Belongs to one task.

    ``run_id`` tells which server process answered last: another one may have forgotten what the
    first had acknowledged. ``settles_at_s``: until when it may be getting that back, in ``time.monotonic``;
    never for one that ``began_empty``.
    """

    def __init__(self, settings: ServerSettings, server: Address | str, *, began_empty: bool = False) -> None:
        self._settings = settings
        self._place = server
        self._began_empty = began_empty
        self._terms = Terms("", Dialect(flagged=settings.url.scheme != "fakeredis"))
        self._answered_at_s = 0.0
        self._transport: asyncio.Transport | None = None
        if settings.url.scheme == "fakeredis":
            self._connection = self._open_fake()
        else:
            self._connection = _new_connection(
                settings, server, db=settings.url.db, redis_connect_func=self._verify, **user_of(settings)
            )

    @property
    def run_id(self) -> str:
        """Run id of the server process."""
        return self._terms.run_id

    @property
    def settles_at_s(self) -> float:
        """When freezing needs to wait no more."""
        return self._terms.settles_at_s

    @property
    def dialect(self) -> Dialect:
        """How scripts are written for it."""
        return self._terms.dialect

    async def connect(self) -> None:
        """Connect, greet and verify the server.

        Raises:
            redis.exceptions.RedisError, OSError: it is away, starting, or no primary.
            DurabilityError, ConfigurationError: it was refused.

        """
        await self._connection.connect()  # type: ignore[no-untyped-call]

    @property
    def is_ready(self) -> bool:
        """Whether ``begin`` may be used: it leads to the same server for sure."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._idle_s() < _TRUSTED_S

    async def pipeline(
        self, commands: Sequence[tuple[Argument, ...]], *, confirm_s: float | None = None
    ) -> tuple[list[Any], bool]:
        """Send all commands at once and return the replies in order, error replies as exceptions.

        With ``confirm_s`` it waits for so long until they are as durable as promised; says whether they are.
        After any exception, cancellation included, the link must be closed: replies may still be under way,
        and what was sent may still be executed.

        Raises:
            redis.exceptions.RedisError, OSError: the connection failed or is out of step; none of the
                replies is known.

        """
        if self._transport is not None:
            return await self.finish(self.begin(commands, confirm_s=confirm_s))
        pipeline = Pipeline(commands, self._terms, confirm_s)
        await self._connection.send_packed_command(pipeline.packed, check_health=False)
        return await self.finish(pipeline)

    def begin(self, commands: Sequence[tuple[Argument, ...]], *, confirm_s: float | None = None) -> Pipeline:
        """Send all commands without waiting for anything; ``finish`` waits for their replies.

        Raises:
            redis.exceptions.ConnectionError: it is not ready; nothing was sent.

        """
        if self._transport is None:
            raise redis_errors.ConnectionError("not connected")
        pipeline = Pipeline(commands, self._terms, confirm_s)
        for piece in pipeline.packed:
            self._transport.write(piece)
        return pipeline

    async def finish(self, pipeline: Pipeline) -> tuple[list[Any], bool]:
        """The replies to what was begun; see ``pipeline``."""
        long = await self._long_values(pipeline.long_values)
        rest = [await _reply(self._connection) for _ in range(pipeline.count - len(long))]
        answers = pipeline.read([*long, *rest])
        self._answered_at_s = time.monotonic()
        return answers

    async def _long_values(self, most: int) -> list[Any]:
        """The first replies, as long as they are long values."""
        values: list[Any] = []
        while len(values) < most and self._transport is not None:
            value = await LongValue(self._transport, max_bytes=PART_BYTES).reply
            if value is None:
                break
            values.append(value)
        return values

    async def is_as_before(self) -> bool:
        """Whether its server has the same writes as before, asked where nothing was sent for a while.

        A busy connection meets a server that is demoted; an idle one may find it a primary again, without
        what others did not have.

        Raises:
            redis.exceptions.RedisError, OSError: as of ``pipeline``, or it is no primary now.
            DurabilityError, ConfigurationError: it was refused.

        """
        if self._idle_s() < _TRUSTED_S or self._settings.url.scheme == "fakeredis":
            return True
        (info, config), _ = await self.pipeline(QUESTIONS)
        before, self._terms = self._terms, self._agreed(info, config)
        return self._terms.run_id == before.run_id

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        self._abort()
        await self._connection.disconnect(nowait=True)

    def _idle_s(self) -> float:
        return time.monotonic() - self._answered_at_s

    def _abort(self) -> None:
        """Give up what was not sent yet; closing in the ordinary way would wait for the server to take it."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _widen(self) -> None:
        """Let a unix socket take a whole part at once; TCP finds its own size, unless it is told one."""
        sock = self._transport.get_extra_info("socket") if self._transport else None
        if sock is not None and sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * PART_BYTES)

    def _open_fake(self) -> AbstractConnection:
        server = fake_server(self._settings)
        from fakeredis import FakeAsyncRedis

        pool: Any = FakeAsyncRedis(server=server).connection_pool
        connection: AbstractConnection = pool.make_connection()
        return connection

    async def _verify(self, connection: AbstractConnection) -> None:
        """Greet the server on a new connection and refuse one that cannot keep the promise."""
        try:
            await connection.on_connect()
            self._transport = _transport_of(connection)
            self._widen()
            self._terms = self._agreed(*[await _answer(connection, *words) for words in QUESTIONS])
            self._answered_at_s = time.monotonic()
        except BaseException:
            # redis-py cleans up after its own errors only.
            await connection.disconnect(nowait=True)
            raise

    def _agreed(self, info: Any, config: Any) -> Terms:
        facts = read_facts(self._place, info, config)
        return agree(facts, self._settings, self._place, began_empty=self._began_empty)


Connected = Callable[[Link, Callable[[bytes], bool]], Awaitable[None]]
"""What is done over a new connection before it is used; told which keys its server holds."""


async def prepare(link: Link, connected: Callable[[], Awaitable[None]]) -> Link:
    """Connect, and do what comes before the first step; close the link if that fails."""
    try:
        await link.connect()
        await connected()
    except BaseException:
        await link.close()
        raise
    return link


class EmbeddedLease:
    """Holds the embedded server for as long as an executor needs it. Threads may share it."""

    def __init__(self, settings: ServerSettings) -> None:
        self._path, self._durability = settings.url.path, settings.durability
        self._server: EmbeddedServer | None = None
        self._lock = threading.Lock()
        self._is_used = self._is_released = False

    def start(self) -> str:
        """Start or join the server that the URL names, again if it has gone, and return its socket's path.

        Raises:
            redis.exceptions.ConnectionError: it was released meanwhile.

        """
        from gym_capture_redis.embedded import EmbeddedServer

        with self._lock:
            if self._is_released:
                raise redis_errors.ConnectionError("the client was closed")
            if self._server is None:
                self._server = EmbeddedServer(
                    self._path or None, appendfsync="always" if self._durability == "fsync" else "everysec"
                )
            self._server.start()
            return str(self._server.socket_path)

    async def started(self) -> str:
        """``start`` on a thread, which goes on if its caller leaves; ``release`` waits for it."""
        self._is_used = True
        return await asyncio.to_thread(self.start)

    @property
    def began_empty(self) -> bool:
        """Whether its directory held no data when it was started: it has forgotten nothing."""
        return self._server is not None and self._server.began_empty

    async def release(self) -> None:
        """Stop on a thread, if there is anything to stop: the default ones may be taken by the user."""
        self._is_released = True
        if self._is_used:
            await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Let the server go; it ends when nobody else holds it."""
        with self._lock:
            server, self._server = self._server, None
            if server is not None:
                server.stop()


async def follow(search: Search[T], settings: ServerSettings) -> T:
    """Ask what ``search`` wants to know, one server after the other, and return what it found.

    Raises:
        redis.exceptions.RedisError: it found nothing, or was refused for good.

    """
    question = next(search)
    while True:
        answer: Any
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                answer = await ask(
                    settings,
                    question.server,
                    *question.words,
                    username=question.username,
                    password=question.password,
                )
        except TimeoutError:
            answer = redis_errors.TimeoutError(f"{question.server} gave no answer")
        except (redis_errors.RedisError, OSError) as error:
            answer = error
        try:
            question = search.send(answer)
        except StopIteration as found:
            result: T = found.value
            return result


async def ask(
    settings: ServerSettings, server: Address, *words: str, username: str | None, password: str | None
) -> Any:
    """The reply of a server to one command, over a connection of its own.

    Raises:
        redis.exceptions.RedisError, OSError: no reply, or an error reply.

    """
    connection = _new_connection(settings, server, username=username, password=password)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_packed_command(pack_command(words), check_health=False)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)


def _new_connection(settings: ServerSettings, server: Address | str, **options: Any) -> AbstractConnection:
    options |= options_of(settings, server) | {
        "retry": Retry(NoBackoff(), 0),  # the one retry loop is ours and has a deadline
        "socket_timeout": None,
        "socket_connect_timeout": None,
    }
    if isinstance(server, str):
        return UnixDomainSocketConnection(**options)
    return (SSLConnection if settings.url.scheme == "tls" else Connection)(**options)


def _transport_of(connection: AbstractConnection) -> asyncio.Transport | None:
    writer = connection._writer  # noqa: SLF001
    # Not asked for its class: uvloop's transports have no base class of asyncio's.
    return cast("asyncio.Transport", writer.transport) if writer else None


async def _answer(connection: AbstractConnection, *words: str) -> Any:
    await connection.send_packed_command(pack_command(words), check_health=False)
    return await _reply(connection)


async def _reply(connection: AbstractConnection) -> Any:
    """The next reply; an error reply as an exception that is not raised."""
    try:
        return await connection.read_response()
    except redis_errors.ResponseError as error:
        return error
