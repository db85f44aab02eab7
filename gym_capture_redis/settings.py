"""Settings and URLs: everything a user can choose, validated before any I/O.

Settings are the keyword arguments of ``RedisTokenSink`` and ``RedisTokenSource``. They may come from
any mapping (YAML, OmegaConf); an unknown one is refused by name. Secrets are never shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from gym_capture_redis.errors import CaptureError, ConfigurationError
from gym_capture_redis.keys import validate_namespace

URL_VARIABLE = "GYM_CAPTURE_REDIS_URL"
DEFAULT_URL = "redis://127.0.0.1:6379/0"
DEFAULT_PORT = 6379

Durability = Literal["memory", "aof", "fsync"]
Scheme = Literal["tcp", "tls", "unix", "embedded", "fakeredis"]

_SCHEMES: Mapping[str, Scheme] = {
    "redis": "tcp",
    "valkey": "tcp",
    "rediss": "tls",
    "valkeys": "tls",
    "unix": "unix",
    "embedded": "embedded",
    "fakeredis": "fakeredis",
}

_UNPARSABLE = "the Redis URL cannot be parsed: '#', '/', '?' and '@' in a password must be percent-encoded"
_LONGEST_DB = 9
"""Digits of a database number; far more than any server has."""

_FORBID_EXTRA = ConfigDict(extra="forbid", frozen=True)

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1)]


def _absolute(value: Any) -> Any:
    """The path as it is meant now: the process may change its working directory."""
    if not isinstance(value, str | os.PathLike):
        return value
    path = os.fspath(value)
    if not path or not isinstance(path, str) or "\0" in path:
        raise ValueError("it is not the path of a directory")
    return Path(os.path.abspath(path))  # noqa: PTH100 - without resolving links: that would be I/O


SpillPath = Annotated[Path, BeforeValidator(_absolute)]


class ServerUrl(BaseModel):
    """A parsed URL: where the server is and who asks.

    ``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` the same over TLS (``valkey://`` and
    ``valkeys://`` mean the same), ``unix:///path/to.sock[?db=n]``, ``embedded:`` or
    ``embedded:///directory`` for a private server, ``fakeredis://name`` for unit tests.
    """

    model_config = _FORBID_EXTRA

    scheme: Scheme
    host: str = ""
    port: int = DEFAULT_PORT
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
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConfigurationError(_UNPARSABLE) from None
        if port == 0 or "@" in parts.query:  # what follows a '?' in a password looks like a query
            raise ConfigurationError(_UNPARSABLE)
        scheme = _SCHEMES.get(parts.scheme)
        if scheme is None:
            named = (
                f"{parts.scheme!r} is not a known URL scheme"
                if "://" in url
                else "the Redis URL has no scheme"
            )
            raise ConfigurationError(f"{named}; use one of {', '.join(f'{name}:' for name in _SCHEMES)}")
        if parts.fragment:
            raise ConfigurationError("the Redis URL has a '#'; in a password it must be written %23")
        db, path = _location(scheme, parts)
        host = parts.hostname or ("127.0.0.1" if scheme in ("tcp", "tls") else "")
        return cls(
            scheme=scheme,
            host=host,
            port=port or DEFAULT_PORT,
            path=path,
            db=db,
            username=unquote(parts.username) if parts.username else None,
            password=SecretStr(unquote(parts.password)) if parts.password else None,
        )

    def __str__(self) -> str:
        """Where the server is, without credentials."""
        if self.scheme in ("tcp", "tls"):
            scheme = "redis" if self.scheme == "tcp" else "rediss"
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"{scheme}://{host}:{self.port}/{self.db}"
        if self.scheme == "fakeredis":
            return f"fakeredis://{self.host}"
        return f"{self.scheme}://{self.path}" if self.path else f"{self.scheme}:"


def _location(scheme: Scheme, parts: SplitResult) -> tuple[int, str]:
    """Database number and path of a URL; which part holds them depends on the scheme."""
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    allowed = {"db"} if scheme == "unix" else set()
    unknown = sorted(set(query) - allowed)
    if unknown:
        raise ConfigurationError(
            f"the Redis URL has the unknown query key {unknown[0]!r}; settings are keyword arguments"
        )
    path = unquote(parts.path)
    if scheme in ("tcp", "tls"):
        db, path = path.strip("/"), ""
    else:
        db = query.get("db", "")
    if scheme == "unix" and not path:
        raise ConfigurationError("a unix: URL needs the path of the socket, as in unix:///run/redis.sock")
    if scheme == "embedded" and path and not path.startswith("/"):
        raise ConfigurationError("embedded: takes an absolute path, as in embedded:///absolute/path")
    if scheme in ("unix", "embedded") and parts.netloc.rpartition("@")[2]:
        raise ConfigurationError(f"{scheme}: takes an absolute path, as in {scheme}:///absolute/path")
    if db and not (db.isascii() and db.isdigit() and len(db) <= _LONGEST_DB):
        raise ConfigurationError("the database in the Redis URL is not a number, as in redis://host:6379/0")
    return int(db or 0), path


class TlsSettings(BaseModel):
    """Certificates for ``rediss://``; without any, the system's authorities decide.

    ``ca_certs_path``, ``cert_path`` and ``key_path`` are PEM files; ``check_hostname`` compares the
    server's certificate with the host of the URL.
    """

    model_config = _FORBID_EXTRA

    ca_certs_path: str | None = None
    cert_path: str | None = None
    key_path: str | None = None
    check_hostname: bool = True


class ConnectionSettings(BaseModel):
    """What sink and source have in common."""

    model_config = _FORBID_EXTRA

    url: ServerUrl
    namespace: Annotated[str, AfterValidator(validate_namespace)] = "default"
    username: str | None = None
    """Overrides the URL's user."""
    password: SecretStr | None = None
    """Overrides the URL's password, so that the URL can be logged."""
    tls: TlsSettings | None = None
    timeout_s: Seconds = 30.0
    """Deadline of every call, retries included."""
    connections: int = Field(default=2, ge=1, le=64)
    """Connections for each event loop and process."""
    max_inflight_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Memory for records on their way to the server (sink), or of snapshots that ``freeze_many`` has read
    and nobody has taken yet (source). Whoever finds no room waits; a larger one goes alone."""
    durability: Durability = "aof"
    """``memory``: lost with the server's memory. ``aof``: survives the server process.
    ``fsync``: survives the machine. Checked against the server on every new connection."""
    assume_appendfsync: Literal["everysec", "always"] | None = None
    """What ``appendfsync`` is, where the server forbids CONFIG and it cannot be asked."""

    @classmethod
    def build(cls, url: str | None, namespace: str, settings: Mapping[str, Any]) -> Self:
        """Validate a constructor's arguments.

        ``url=None`` reads ``GYM_CAPTURE_REDIS_URL``, else ``redis://127.0.0.1:6379/0``.

        Raises:
            ConfigurationError: an unknown setting, by name, or a value out of range.
            InvalidIdentifierError: a namespace outside the alphabet.

        """
        address = url if url is not None else os.environ.get(URL_VARIABLE) or DEFAULT_URL
        if not isinstance(address, str):
            raise ConfigurationError(f"url must be a string, not a {type(address).__name__}")
        parsed = ServerUrl.parse(address)
        if settings.get("tls") is not None and parsed.scheme != "tls":
            raise ConfigurationError(
                "setting 'tls' needs a rediss:// URL; with this one nothing is encrypted"
            )
        try:
            return cls.model_validate(
                {
                    **_plain(settings),
                    "url": parsed,
                    "namespace": validate_namespace(namespace),
                }
            )
        except CaptureError:
            raise
        except ValidationError as error:
            raise ConfigurationError(cls._explain(error)) from None

    @classmethod
    def _explain(cls, error: ValidationError) -> str:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(name for name in cls.model_fields if name not in ("url", "namespace"))
            return f"{name!r} is not a setting; the settings are {known}"
        return f"setting {name!r} is refused: {first['msg']}"


class SinkSettings(ConnectionSettings):
    """Settings of ``RedisTokenSink``."""

    max_record_bytes: Bytes = Field(default=256 * 2**20, le=500 * 2**20)
    """Largest encoded record with its tokens; Redis itself refuses 512 MiB and more."""
    prefix_cache_bytes: int = Field(default=256 * 2**20, ge=0)
    """Memory for the prompts of the newest rollouts, which spares hashing and sending them again."""
    spill_dir: SpillPath | None = None
    """Directory for marks that could not be made in Redis, until they can; None: they fail."""


class SourceSettings(ConnectionSettings):
    """Settings of ``RedisTokenSource``."""

    timeout_s: Seconds = 120.0
    """Deadline of every call, all chunks of a large rollout included."""
    chunk_bytes: Bytes = 2**20
    """Records are read in replies of about this size; a larger record comes alone."""
    tombstone_ttl_s: int = Field(default=86_400, ge=60)
    """How long a retired rollout refuses late writers; longer than any writer's deadline."""


def _plain(value: Any) -> Any:
    """Mappings and sequences of any class (OmegaConf's, for one) as dicts and lists, for pydantic."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_plain(item) for item in value]
    return value
