"""Connections of redis-py, verified every time they connect.

The only module that knows redis-py's connections; which exceptions mean what is in ``faults.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    InvalidResponse,
    NoPermissionError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from gym_capture_redis.errors import ConfigurationError, DurabilityError
from gym_capture_redis.parts import PART_BYTES
from gym_capture_redis.scripts import Argument, Dialect
from gym_capture_redis.server_check import (
    CONFIG_NAMES,
    Confirming,
    ServerFacts,
    check_server,
    confirming_commands,
    warnings_about,
)
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ConnectionSettings, TlsSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gym_capture_redis.embedded import EmbeddedServer

logger = logging.getLogger(__name__)

_FAKE_SERVERS: dict[str, Any] = {}
_WARNED: set[tuple[str, str]] = set()


class Link:
    """One connection to a server, given by address or path of its socket. Belongs to one task.

    ``run_id`` tells which server process answered last: another one may have forgotten what the
    first had acknowledged. ``dialect``: how scripts are written for it.
    """

    def __init__(self, settings: ConnectionSettings, server: Address | str) -> None:
        self._settings = settings
        self._server = str(settings.url)
        self.run_id = ""
        self.dialect = Dialect(flagged=settings.url.scheme != "fakeredis")
        self._confirming: list[Confirming] = []
        self._transport: asyncio.WriteTransport | None = None
        if settings.url.scheme == "fakeredis":
            self._connection = self._open_fake()
        else:
            self._connection = _new_connection(
                settings, server, db=settings.url.db, redis_connect_func=self._verify, **user_of(settings)
            )

    async def connect(self) -> None:
        """Connect, greet and verify the server.

        Raises:
            redis.exceptions.RedisError, OSError: it is away, starting, or no primary.
            DurabilityError, ConfigurationError: it was refused.

        """
        await self._connection.connect()  # type: ignore[no-untyped-call]

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
        connection = self._connection
        # Nothing in the protocol ties a reply to its command: one reply too many would shift all others.
        nonce = secrets.token_bytes(8)
        confirming = self._confirming if confirm_s is not None else []
        wait_ms = max(1, int((confirm_s or 0) * 1000))  # 0 would be for ever
        sent = [*commands, *((*each.words, wait_ms) for each in confirming), ("ECHO", nonce)]
        await connection.send_packed_command(b"".join(map(pack_command, sent)), check_health=False)
        *replies, echo = [await _reply(connection) for _ in sent]
        if echo != nonce:
            raise InvalidResponse("the replies are out of step with the commands")
        waited = zip(replies[len(commands) :], confirming, strict=True)
        return replies[: len(commands)], all(_count(reply) >= each.least for reply, each in waited)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        self._abort()
        await self._connection.disconnect(nowait=True)

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
        try:
            from fakeredis import FakeAsyncRedis, FakeServer
        except ImportError:
            raise ConfigurationError("fakeredis: needs `pip install 'gym-capture-redis[fake]'`") from None
        if self._settings.durability != "memory":
            raise DurabilityError("fakeredis keeps nothing; choose durability='memory' in your unit test")
        server = _FAKE_SERVERS.setdefault(self._settings.url.host, FakeServer())
        pool: Any = FakeAsyncRedis(server=server).connection_pool
        connection: AbstractConnection = pool.make_connection()
        return connection

    async def _verify(self, connection: AbstractConnection) -> None:
        """Greet the server on a new connection and refuse one that cannot keep the promise."""
        try:
            await connection.on_connect()
            self._transport = connection._writer.transport if connection._writer else None  # noqa: SLF001
            self._widen()
            facts = await _ask(connection)
            check_server(
                facts,
                durability=self._settings.durability,
                assume_appendfsync=self._settings.assume_appendfsync,
                server=self._server,
            )
        except BaseException:
            # redis-py cleans up after its own errors only.
            await connection.disconnect(nowait=True)
            raise
        self.run_id = facts.run_id
        self._confirming = confirming_commands(facts, self._settings)
        self.dialect = Dialect(confirmed=bool(self._confirming))
        for warning in warnings_about(
            facts, topology=self._settings.url.topology, replicas=self._settings.replicas
        ):
            _warn_once(self._server, warning)


class EmbeddedLease:
    """Holds the embedded server for as long as an executor needs it."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._path, self._durability = settings.url.path, settings.durability
        self._server: EmbeddedServer | None = None

    async def acquire(self) -> str:
        """Start or join the server that the URL names, again if it has gone, and return its socket's path."""
        from gym_capture_redis.embedded import EmbeddedServer

        if self._server is None:
            self._server = EmbeddedServer(
                self._path or None, appendfsync="always" if self._durability == "fsync" else "everysec"
            )
        await asyncio.to_thread(self._server.start)
        return str(self._server.socket_path)

    async def release(self) -> None:
        """Let the server go; it ends when nobody else holds it."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)


def pack_command(words: Sequence[Argument]) -> bytes:
    """A command as it goes over the wire. redis-py takes three times as long for one of many short words."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts += (b"$%d\r\n" % len(raw), raw, b"\r\n")
    return b"".join(parts)


async def ask(
    settings: ConnectionSettings, server: Address, *words: str, username: str | None, password: str | None
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


def _new_connection(
    settings: ConnectionSettings, server: Address | str, **options: Any
) -> AbstractConnection:
    options |= {
        "protocol": 2,  # RESP3 switches off the check for connections that are out of step
        "retry": Retry(NoBackoff(), 0),  # the one retry loop is ours and has a deadline
        "socket_timeout": None,
        "socket_connect_timeout": None,
        "socket_read_size": PART_BYTES,
    }
    if isinstance(server, str):
        return UnixDomainSocketConnection(path=server, **options)
    options |= {"host": server.host, "port": server.port, "socket_keepalive": True}
    if settings.url.scheme == "tls":
        return SSLConnection(**options, **_tls_options(settings.tls or TlsSettings()))
    return Connection(**options)


def user_of(settings: ConnectionSettings) -> dict[str, str | None]:
    """Who asks, for servers that hold rollouts."""
    secret = settings.password or settings.url.password
    return {
        "username": settings.username or settings.url.username,
        "password": secret.get_secret_value() if secret else None,
    }


def _count(reply: Any) -> int:
    """How many have it, by the reply of ``WAIT``, or the first of ``WAITAOF``; none by an error."""
    first = reply[0] if isinstance(reply, list) and reply else reply
    return first if isinstance(first, int) else 0


def _warn_once(server: str, warning: str) -> None:
    if (server, warning) not in _WARNED:
        _WARNED.add((server, warning))
        logger.warning("%s: %s", server, warning)


async def _reply(connection: AbstractConnection) -> Any:
    """The next reply; an error reply as an exception that is not raised."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


async def _ask(connection: AbstractConnection) -> ServerFacts:
    """What the server says of itself, once it can say it."""
    facts = await _read_facts(connection)
    if facts.still_starting:
        raise BusyLoadingError(facts.still_starting)
    if not facts.is_primary:  # demoted, or not promoted yet
        raise RedisConnectionError("it is a replica")
    return facts


async def _read_facts(connection: AbstractConnection) -> ServerFacts:
    await connection.send_command("INFO")
    info = await connection.read_response()
    await connection.send_command("CONFIG", "GET", *CONFIG_NAMES)
    try:
        flat = await connection.read_response()
    except (NoPermissionError, ResponseError):
        return ServerFacts.parse(info, None)
    words = [word.decode("utf-8", "replace") for word in flat]
    return ServerFacts.parse(info, dict(zip(words[::2], words[1::2], strict=True)))


def _tls_options(tls: TlsSettings) -> dict[str, Any]:
    for name in ("ca_certs_path", "cert_path", "key_path"):
        path = getattr(tls, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigurationError(f"setting 'tls.{name}' names {path!r}, which cannot be read")
    return {
        "ssl_ca_certs": tls.ca_certs_path,
        "ssl_certfile": tls.cert_path,
        "ssl_keyfile": tls.key_path,
        "ssl_check_hostname": tls.check_hostname,
    }
