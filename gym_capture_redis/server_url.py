"""Where the server is and who asks, as one URL. Parsed here: redis-py's own parsing leaks passwords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gym_capture_redis.errors import ConfigurationError

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379

Scheme = Literal["tcp", "tls", "unix", "embedded", "fakeredis"]
Topology = Literal["standalone", "sentinel", "cluster"]

_SCHEMES: Mapping[str, tuple[Scheme, Topology]] = {
    "redis": ("tcp", "standalone"),
    "valkey": ("tcp", "standalone"),
    "rediss": ("tls", "standalone"),
    "valkeys": ("tls", "standalone"),
    "redis+sentinel": ("tcp", "sentinel"),
    "valkey+sentinel": ("tcp", "sentinel"),
    "rediss+sentinel": ("tls", "sentinel"),
    "valkeys+sentinel": ("tls", "sentinel"),
    "redis+cluster": ("tcp", "cluster"),
    "valkey+cluster": ("tcp", "cluster"),
    "rediss+cluster": ("tls", "cluster"),
    "valkeys+cluster": ("tls", "cluster"),
    "unix": ("unix", "standalone"),
    "embedded": ("embedded", "standalone"),
    "fakeredis": ("fakeredis", "standalone"),
}

_HOST = re.compile(r"\[[^\[\]\s]*\]|[^\[\]:\s]*")
_PORT = re.compile(r"\d{1,5}", re.ASCII)
_ODD_CHARACTER = "a character in it looks like one of those that separate its parts"
_HIGHEST_PORT = 65_535
_LONGEST_DB = 9
"""Digits of a database number; far more than any server has."""


class Address(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ServerUrl(BaseModel):
    """A parsed URL: where the server is and who asks.

    ``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` the same over TLS (``valkey://`` and
    ``valkeys://`` mean the same); ``redis+sentinel://host[:port],host[:port]/service[/db]`` names the
    sentinels and the service whose primary they know, ``redis+cluster://host[:port],host[:port]`` a few
    nodes of a Cluster (both with ``rediss`` over TLS); ``unix:///path/to.sock[?db=n]``, ``embedded:`` or
    ``embedded:///directory`` for a private server, ``fakeredis://name`` for unit tests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: Scheme
    topology: Topology = "standalone"
    host: str = ""
    port: int = DEFAULT_PORT
    more: tuple[Address, ...] = ()
    """Further sentinels, or nodes of the Cluster."""
    service: str = ""
    """What the sentinels call the primary and its replicas."""
    path: str = ""
    db: int = Field(default=0, ge=0)
    username: str | None = None
    password: SecretStr | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse ``url``.

        Raises:
            ConfigurationError: an unknown scheme or query key, or a malformed part; never quotes the URL.

        """
        if url != url.strip():
            raise ConfigurationError("the Redis URL begins or ends with white space")
        try:
            parts = urlsplit(url)
        except ValueError:
            has_brackets = "[" in url or "]" in url
            why = (
                "brackets stand around an IPv6 address only, as in [::1]" if has_brackets else _ODD_CHARACTER
            )
            raise _unparsable(why) from None
        if "@" in parts.query:  # what follows a '?' in a password looks like a query
            raise _unparsable("it has an '@' behind a '?'")
        scheme, topology = _kind(url, parts)
        user, password, hosts = _authority(parts.netloc)
        (host, port), *more = _addresses(hosts, scheme, topology)
        if parts.fragment:
            raise ConfigurationError("the Redis URL has a '#'; in a password it must be written %23")
        service, db, path = _location(scheme, topology, parts)
        return cls(
            scheme=scheme,
            topology=topology,
            host=host,
            port=port,
            more=tuple(more),
            service=service,
            path=path,
            db=db,
            username=user,
            password=SecretStr(password) if password else None,
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All that were named."""
        return Address(self.host, self.port), *self.more

    def __str__(self) -> str:
        """Where the server is, without credentials."""
        if self.scheme in ("tcp", "tls"):
            scheme = "redis" if self.scheme == "tcp" else "rediss"
            kind = f"+{self.topology}" if self.topology != "standalone" else ""
            service = f"/{self.service}" if self.service else ""
            return f"{scheme}{kind}://{','.join(map(str, self.addresses))}{service}/{self.db}"
        if self.scheme == "fakeredis":
            return f"fakeredis://{self.host}"
        return f"{self.scheme}://{self.path}" if self.path else f"{self.scheme}:"


def _kind(url: str, parts: SplitResult) -> tuple[Scheme, Topology]:
    kind = _SCHEMES.get(parts.scheme)
    if kind is not None:
        return kind
    named = f"{parts.scheme!r} is not a known URL scheme" if "://" in url else "the Redis URL has no scheme"
    raise ConfigurationError(f"{named}; use one of {', '.join(f'{name}:' for name in _SCHEMES)}")


def _authority(netloc: str) -> tuple[str | None, str | None, str]:
    """User, password, and the rest."""
    credentials, _, hosts = netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    return unquote(user) or None, unquote(password) or None, hosts


def _addresses(hosts: str, scheme: Scheme, topology: Topology) -> list[Address]:
    several = topology != "standalone"
    if "," in hosts and not several:
        raise ConfigurationError("several hosts need a URL that says what they are: +sentinel or +cluster")
    if several and not hosts:
        raise ConfigurationError(f"a +{topology} URL names one or more hosts, as in redis+{topology}://a,b")
    default_host = "127.0.0.1" if scheme in ("tcp", "tls") and not several else ""
    default_port = DEFAULT_SENTINEL_PORT if topology == "sentinel" else DEFAULT_PORT
    addresses = []
    for part in hosts.split(",") if several else [hosts]:
        host, colon, port = _split_port(part)
        if not _HOST.fullmatch(host):
            raise _unparsable("its host has white space or a ':', which an IPv6 address has in brackets only")
        if several and not host:
            raise _unparsable("a host is missing before or after a ','")
        if colon and not (_PORT.fullmatch(port) and 0 < int(port) <= _HIGHEST_PORT):
            raise _unparsable(f"its port is not a number from 1 to {_HIGHEST_PORT}")
        addresses.append(Address(host.strip("[]").lower() or default_host, int(port or default_port)))
    return addresses


def _split_port(part: str) -> tuple[str, str, str]:
    """Host, colon and port; without a port both of these are empty."""
    return (part, "", "") if part.endswith("]") or ":" not in part else part.rpartition(":")


def _unparsable(why: str) -> ConfigurationError:
    """Names the part that is wrong and quotes nothing: what looks like a port may belong to the password."""
    return ConfigurationError(
        f"the Redis URL cannot be parsed: {why}; in a password '#', '/', '?', '@', '[' and ']' must be "
        "percent-encoded"
    )


def _location(scheme: Scheme, topology: Topology, parts: SplitResult) -> tuple[str, int, str]:
    """Service, database number and path of a URL; which part holds them depends on its kind."""
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    allowed = {"db"} if scheme == "unix" else set()
    unknown = sorted(set(query) - allowed)
    if unknown:
        raise ConfigurationError(
            f"the Redis URL has the unknown query key {unknown[0]!r}; settings are keyword arguments"
        )
    service, path = "", unquote(parts.path)
    if scheme in ("tcp", "tls"):
        db, path = path.strip("/"), ""
    else:
        db = query.get("db", "")
    if topology == "sentinel":
        service, _, db = db.partition("/")
        if not service:
            raise ConfigurationError("a +sentinel URL names the service, as in redis+sentinel://a,b/service")
    if scheme == "unix" and not path:
        raise ConfigurationError("a unix: URL needs the path of the socket, as in unix:///run/redis.sock")
    if scheme == "embedded" and path and not path.startswith("/"):
        raise ConfigurationError("embedded: takes an absolute path, as in embedded:///absolute/path")
    if scheme in ("unix", "embedded") and parts.netloc.rpartition("@")[2]:
        raise ConfigurationError(f"{scheme}: takes an absolute path, as in {scheme}:///absolute/path")
    if db and not (db.isascii() and db.isdigit() and len(db) <= _LONGEST_DB):
        raise ConfigurationError("the database in the Redis URL is not a number, as in redis://host:6379/0")
    if topology == "cluster" and db and int(db):
        raise ConfigurationError("a Cluster has database 0 only; leave the number out of the Redis URL")
    return service, int(db or 0), path
