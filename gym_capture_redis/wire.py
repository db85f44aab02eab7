"""What goes over a connection, whoever waits for it: options, greeting, pipelines. No I/O here.

Async and sync connections share this module.
"""

from __future__ import annotations

import logging
import os
import secrets
import ssl
from collections.abc import Sequence
from functools import cache
from itertools import chain, groupby, takewhile
from typing import Any, NamedTuple

from redis.driver_info import DriverInfo
from redis.exceptions import BusyLoadingError, InvalidResponse, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from gym_capture_redis.errors import ConfigurationError, DurabilityError
from gym_capture_redis.faults import is_transient
from gym_capture_redis.parts import PART_BYTES
from gym_capture_redis.scripts import Argument, Dialect, Step
from gym_capture_redis.server_check import (
    CONFIG_NAMES,
    Confirming,
    ServerFacts,
    ServersSeen,
    check_kind,
    check_server,
    confirming_commands,
    warnings_about,
)
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ServerSettings, TlsSettings

logger = logging.getLogger(__name__)

QUESTIONS: tuple[tuple[str, ...], ...] = (("INFO",), ("CONFIG", "GET", *CONFIG_NAMES))
"""What a server is asked on every new connection."""

_FAKE_SERVERS: dict[str, Any] = {}
_SEEN = ServersSeen()
_WARNED: set[tuple[Address | str, str]] = set()


_LONG_WORD_BYTES = 2**16
"""Copying longer words into one packet would cost more than to send them by themselves."""


class Terms(NamedTuple):
    """How to work with a server that was verified, and what it must be asked.

    ``run_id`` tells which process it is, and whose writes it has (``ServersSeen.name``).
    """

    run_id: str
    dialect: Dialect
    confirming: tuple[Confirming, ...] = ()
    settles_at_s: float = 0.0
    """Until when it may be getting back what it forgot, in ``time.monotonic``."""


def read_facts(
    place: Address | str, info: bytes | ResponseError, config: list[bytes] | ResponseError
) -> ServerFacts:
    """What the server at ``place`` said to ``QUESTIONS``.

    Raises:
        redis.exceptions.RedisError: it cannot say yet, or will not, or something else was answered.

    """
    if isinstance(info, ResponseError):
        raise info
    if not isinstance(info, bytes) or not isinstance(config, list | ResponseError):
        raise InvalidResponse("the replies are out of step with the questions")
    if isinstance(config, ResponseError) and is_transient(config):  # busy, say
        raise config
    pairs = None
    if not isinstance(config, ResponseError):  # else CONFIG is forbidden
        words = [word.decode("utf-8", "replace") for word in config]
        pairs = dict(zip(words[::2], words[1::2], strict=True))
    facts = ServerFacts.parse(info, pairs)
    if facts.still_starting:
        _SEEN.meet_starting(place)
        raise BusyLoadingError(facts.still_starting)
    return facts


def agree(
    facts: ServerFacts, settings: ServerSettings, place: Address | str, *, began_empty: bool = False
) -> Terms:
    """Refuse a server that cannot keep the promise, and warn of what is not safe.

    A process is warned once for each server and kind of warning.

    Raises:
        redis.exceptions.ConnectionError: it is no primary now.
        DurabilityError, ConfigurationError: see ``check_kind`` and ``check_server``.

    """
    server = str(settings.url)
    check_kind(facts, topology=settings.url.topology, server=server)
    if not facts.is_primary:  # demoted, or not promoted yet
        raise RedisConnectionError("it is a replica")
    check_server(
        facts,
        durability=settings.durability,
        assume_appendfsync=settings.assume_appendfsync,
        server=server,
    )
    warnings = warnings_about(facts, topology=settings.url.topology, replicas=settings.replicas)
    for kind, warning in warnings.items():
        if (place, kind) not in _WARNED:
            _WARNED.add((place, kind))
            named = server if settings.url.topology == "standalone" else f"{server} ({place})"
            logger.warning("%s: %s", named, warning)
    confirming = tuple(confirming_commands(facts, settings))
    settles_at_s = 0.0 if began_empty else _SEEN.meet(place, facts, settle_s=settings.settle_s)
    return Terms(_SEEN.name(facts), Dialect(confirmed=bool(confirming)), confirming, settles_at_s)


class Pipeline:
    """Commands that are sent at once, and what their replies mean.

    With ``confirm_s`` it waits for so long until they are as durable as promised. ``packed`` is what to send,
    in few pieces; ``count`` how many replies will come, of which the first ``long_values`` may be long ones.
    """

    def __init__(
        self, commands: Sequence[tuple[Argument, ...]], terms: Terms, confirm_s: float | None
    ) -> None:
        # Nothing in the protocol ties a reply to its command: one reply too many would shift all others.
        self._nonce = secrets.token_bytes(8)
        self._commands = len(commands)
        self.long_values = sum(1 for _ in takewhile(_is_fetch, commands))
        self._confirming = terms.confirming if confirm_s is not None else ()
        wait_ms = max(1, int((confirm_s or 0) * 1000))  # 0 would be for ever
        sent = [*commands, *((*each.words, wait_ms) for each in self._confirming), ("ECHO", self._nonce)]
        self.count = len(sent)
        self.packed = _joined(list(chain.from_iterable(map(_pieces, sent))))

    def read(self, replies: Sequence[Any]) -> tuple[list[Any], bool]:
        """The replies to the commands, and whether they are confirmed.

        Raises:
            InvalidResponse: the connection is out of step; none of the replies is known.

        """
        *answers, echo = replies
        if echo != self._nonce:
            raise InvalidResponse("the replies are out of step with the commands")
        waited = zip(answers[self._commands :], self._confirming, strict=True)
        return answers[: self._commands], all(_count(reply) >= each.least for reply, each in waited)


def _joined(pieces: list[bytes]) -> list[bytes]:
    """The same bytes in few pieces: short ones joined, long ones as they are."""
    if max(map(len, pieces)) < _LONG_WORD_BYTES:
        return [b"".join(pieces)]
    runs = groupby(pieces, key=lambda piece: len(piece) < _LONG_WORD_BYTES)
    return [joined for is_short, run in runs for joined in ([b"".join(run)] if is_short else run)]


def pack_command(words: Sequence[Argument]) -> bytes:
    """A command as it goes over the wire. redis-py takes three times as long for one of many short words."""
    return b"".join(_pieces(words))


def user_of(settings: ServerSettings) -> dict[str, str | None]:
    """Who asks, for servers that hold rollouts."""
    secret = settings.password or settings.url.password
    return {
        "username": settings.username or settings.url.username,
        "password": secret.get_secret_value() if secret else None,
    }


def options_of(settings: ServerSettings, server: Address | str) -> dict[str, Any]:
    """Options of redis-py's connection to a server, given by address or path of its socket."""
    options: dict[str, Any] = {
        "protocol": 2,  # RESP3 switches off the check for connections that are out of step
        "socket_read_size": PART_BYTES,
        "driver_info": _driver_info(),
    }
    if isinstance(server, str):
        return options | {"path": server}
    options |= {"host": server.host, "port": server.port, "socket_keepalive": True}
    if settings.url.scheme == "tls":
        options |= _tls_options(settings.tls or TlsSettings())
    return options


def fake_server(settings: ServerSettings) -> Any:
    """The fake server of a ``fakeredis:`` URL, the same for the whole process.

    Raises:
        ConfigurationError: fakeredis is not installed.
        DurabilityError: more is asked for than it can promise.

    """
    try:
        from fakeredis import FakeServer
    except ImportError:
        raise ConfigurationError("fakeredis: needs `pip install 'gym-capture-redis[fake]'`") from None
    if settings.durability != "memory":
        raise DurabilityError("fakeredis keeps nothing; choose durability='memory' in your unit test")
    return _FAKE_SERVERS.setdefault(settings.url.host, FakeServer())


@cache
def _driver_info() -> DriverInfo:
    """What redis-py says of itself; else it looks for its version on the disk for every connection."""
    return DriverInfo()


def _tls_options(tls: TlsSettings) -> dict[str, Any]:
    for name in ("ca_certs_path", "cert_path", "key_path"):
        path = getattr(tls, name)
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigurationError(f"setting 'tls.{name}' names {path!r}, which cannot be read")
    _load_certificates(tls)
    return {
        "ssl_ca_certs": tls.ca_certs_path,
        "ssl_certfile": tls.cert_path,
        "ssl_keyfile": tls.key_path,
        "ssl_check_hostname": tls.check_hostname,
    }


def _load_certificates(tls: TlsSettings) -> None:
    """Refuse files that no connection could use; redis-py would take them for a server that is away."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca_certs_path:
        try:
            context.load_verify_locations(tls.ca_certs_path)
        except ssl.SSLError:
            raise ConfigurationError(
                f"setting 'tls.ca_certs_path' names {tls.ca_certs_path!r}, which holds no certificate in PEM"
            ) from None
    if tls.key_path and not tls.cert_path:
        raise ConfigurationError("setting 'tls.key_path' needs 'tls.cert_path', the certificate of the key")
    if tls.cert_path:
        try:
            # Without any password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(tls.cert_path, tls.key_path, password="")
        except ssl.SSLError:
            raise ConfigurationError(
                "'tls.cert_path' and 'tls.key_path' are no certificate in PEM and its key, which must "
                "not be encrypted; without 'tls.key_path' both must be in the file of 'tls.cert_path'"
            ) from None


def _pieces(words: Sequence[Argument]) -> list[bytes]:
    pieces = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        if len(raw) < _LONG_WORD_BYTES:
            pieces.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
        else:
            pieces += (b"$%d\r\n" % len(raw), raw, b"\r\n")
    return pieces


def _is_fetch(words: Sequence[Argument]) -> bool:
    return words[0] == Step.FETCH.value[0]


def _count(reply: Any) -> int:
    """How many have it, by the reply of ``WAIT``, or the first of ``WAITAOF``; none by an error."""
    first = reply[0] if isinstance(reply, list) and reply else reply
    return first if isinstance(first, int) else 0
