"""Settings: everything a user can choose, validated before any I/O.

Settings are the keyword arguments of ``RedisTokenSink`` and ``RedisTokenSource``. They may come from
any mapping (YAML, OmegaConf); an unknown one is refused by name. Secrets are never shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from gym_capture_redis.errors import CaptureError, ConfigurationError
from gym_capture_redis.keys import validate_namespace
from gym_capture_redis.plain_words import rule_for_setting, shown
from gym_capture_redis.server_url import ServerUrl

URL_VARIABLE = "GYM_CAPTURE_REDIS_URL"
DEFAULT_URL = "redis://127.0.0.1:6379/0"

Durability = Literal["memory", "aof", "fsync"]

_SECRETS = frozenset(("username", "password", "sentinel_username", "sentinel_password"))
"""Settings whose values no message shows, whatever was given."""
_WORDS_ONLY = frozenset(("durability", "assume_appendfsync", "spill_dir"))
"""Those whose text is shown; text in place of a number may be a password that went astray."""

_FORBID_EXTRA = ConfigDict(extra="forbid", frozen=True)

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1)]
TombstoneSeconds = Annotated[int, Field(ge=60)]


def _absolute(value: Any) -> Any:
    """The path as it is meant now: the process may change its working directory."""
    if not isinstance(value, str | os.PathLike):
        return value
    path = os.fspath(value)
    if not path or not isinstance(path, str) or "\0" in path:
        raise ValueError("must be the path of a directory")
    path = os.path.expanduser(path)  # noqa: PTH111 - as a shell does it
    if path.startswith("~"):
        raise ValueError("must be in a home directory that is known")
    return Path(os.path.abspath(path))  # noqa: PTH100 - without resolving links: that would be I/O


SpillPath = Annotated[Path, BeforeValidator(_absolute)]


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


class ServerSettings(BaseModel):
    """What all have in common that work with the server."""

    model_config = _FORBID_EXTRA

    used_by: ClassVar[str] = "client"
    """Name of the class whose settings these are."""

    url: ServerUrl
    namespace: Annotated[str, AfterValidator(validate_namespace)] = "default"
    username: str | None = None
    """Overrides the URL's user."""
    password: SecretStr | None = None
    """Overrides the URL's password, so that the URL can be logged."""
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    """How to log in to the sentinels; the URL's user is that of the servers."""
    tls: TlsSettings | None = None
    timeout_s: Seconds = 30.0
    """Deadline of every call, retries included."""
    connections: int = Field(default=3, ge=1, le=64)
    """Connections for each event loop and process; of those that block, how many stay open while idle."""
    durability: Durability = "aof"
    """``memory``: lost with the server's memory. ``aof``: survives the server process.
    ``fsync``: survives the machine. Checked against the server on every new connection."""
    replicas: int = Field(default=0, ge=0, le=64)
    """How many replicas, too, must have each step before it returns (``WAIT``): it narrows what a failover
    can lose, and does not rule it out."""
    settle_s: Seconds = 5.0
    """How long workers get to put back what a server forgot that was started or promoted a moment ago: a sink
    keeps its newest steps for so long, and a source waits for so long before it freezes. The same for all,
    and less than ``timeout_s``."""
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
        parsed = ServerUrl.parse(resolved_url(url))
        if settings.get("tls") is not None and parsed.scheme != "tls":
            raise ConfigurationError(
                "setting 'tls' needs a rediss:// URL; with this one nothing is encrypted"
            )
        try:
            return cls.model_validate(
                {
                    **plain(settings),
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
        first = error.errors(include_url=False)[0]
        loc = first["loc"]
        name = ".".join(str(part) for part in loc)
        if first["type"] == "extra_forbidden":
            kind, group = (TlsSettings, "settings of tls") if loc[0] == "tls" else (cls, "settings")
            known = ", ".join(kind.model_fields)
            return f"{cls.used_by}: {name!r} is not a setting; the {group} are {known}"
        rule = rule_for_setting(first)
        if name in _SECRETS:
            given = f"of type {type(first['input']).__name__}"
        else:
            given = shown(first["input"], text=name in _WORDS_ONLY)
        return f"{cls.used_by}: setting {name!r} is refused: it {rule}, not {given}"


class ConnectionSettings(ServerSettings):
    """What sink and source have in common."""

    max_inflight_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Memory for records on their way to the server (sink), or of snapshots that ``freeze_many`` has read
    and nobody has taken yet (source). Whoever finds no room waits; a larger one goes alone."""


class WriterSettings(ConnectionSettings):
    """What all have in common that write what a server might forget."""

    max_recent_bytes: int = Field(default=64 * 2**20, ge=0)
    """Memory for the steps of the last ``settle_s``, to be put back if the server forgets them."""

    @property
    def server_may_forget(self) -> bool:
        """Whether a server that keeps its promise may come back without acknowledged steps."""
        if self.url.scheme == "fakeredis":
            return False
        return self.durability != "fsync" or self.url.topology != "standalone"


class SinkSettings(WriterSettings):
    """Settings of ``RedisTokenSink``."""

    used_by = "RedisTokenSink"

    max_record_bytes: Bytes = Field(default=256 * 2**20, le=500 * 2**20)
    """Largest encoded record with its tokens; Redis itself refuses 512 MiB and more."""
    prefix_cache_bytes: int = Field(default=256 * 2**20, ge=0)
    """Memory for the prompts of the newest rollouts, which spares hashing and sending them again."""
    spill_dir: SpillPath | None = None
    """Directory for marks that could not be made in Redis, until they can; None: they fail."""


class SourceSettings(ConnectionSettings):
    """Settings of ``RedisTokenSource``."""

    used_by = "RedisTokenSource"

    timeout_s: Seconds = 120.0
    """Deadline of every call, all chunks of a large rollout included."""
    connections: int = Field(default=4, ge=1, le=64)
    """Connections for each event loop and process: enough that the next rollouts are there, large and small,
    once one is decoded."""
    chunk_bytes: Bytes = 2**20
    """Records are read in replies of about this size; a larger record comes alone."""
    tombstone_ttl_s: TombstoneSeconds = 86_400
    """How long a retired rollout refuses late writers; longer than any writer's deadline."""


class LineageSettings(ServerSettings):
    """Settings of ``RedisLineageStore``."""

    used_by = "RedisLineageStore"

    prefix_cache_bytes: int = Field(default=64 * 2**20, ge=0)
    """Memory for the tokens of the newest parents, which spares reading what they begin with again."""
    max_cached_rollouts: int = Field(default=65_536, ge=1)
    """Rollouts whose calls are remembered, without their tokens."""
    max_cached_tokens: int = Field(default=8_000_000, ge=1)
    """Tokens that Gym itself keeps, of parents whose children hold only what they add (``delta_records``)."""


class LedgerSettings(WriterSettings):
    """Settings of ``RedisCaptureLedger``."""

    used_by = "RedisCaptureLedger"

    max_cached_rollouts: int = Field(default=65_536, ge=1)
    """Rollouts whose rows are remembered as far as finding parents needs them."""
    tombstone_ttl_s: TombstoneSeconds = 86_400
    """How long a retired rollout drops late rows; longer than any writer's deadline."""


class StagingSinkSettings(ServerSettings):
    """Settings of ``RedisStagingSink``."""

    used_by = "RedisStagingSink"

    max_record_bytes: Bytes = Field(default=256 * 2**20, le=500 * 2**20)
    """Largest encoded record with its extras and attachments."""
    part_cache_bytes: int = Field(default=16 * 2**20, ge=0)
    """Memory for the names of stored parts of the newest rollouts, which spares sending equal ones again."""


class StagingSourceSettings(ServerSettings):
    """Settings of ``RedisStagingSource``."""

    used_by = "RedisStagingSource"

    timeout_s: Seconds = 120.0
    """Deadline of every call, all that it reads included."""
    chunk_bytes: Bytes = 2**20
    """Records and parts are read in replies of about this size; a larger one comes alone."""
    prefix_cache_bytes: int = Field(default=64 * 2**20, ge=0)
    """Memory for the tokens of the newest chains, which spares reading what the next ones begin with."""
    tombstone_ttl_s: TombstoneSeconds = 86_400
    """How long a retired rollout refuses late stagings; longer than any worker's deadline."""


def resolved_url(url: str | None) -> str:
    """``url``, or for None the one that this process's environment names.

    Raises:
        ConfigurationError: it is no string.

    """
    address = url if url is not None else os.environ.get(URL_VARIABLE) or DEFAULT_URL
    if not isinstance(address, str):
        raise ConfigurationError(f"url must be a string, not of type {type(address).__name__}")
    return address


def plain(value: Any) -> Any:
    """Mappings and sequences of any class (OmegaConf's, for one) as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain(item) for item in value]
    return value
