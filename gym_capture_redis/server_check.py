"""Can the server keep what the settings promise? Pure: reads the replies of INFO and CONFIG GET."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gym_capture_redis.errors import ConfigurationError, DurabilityError
from gym_capture_redis.settings import Durability

OLDEST_VERSION = (7, 0)

CONFIG_NAMES = ("appendfsync",)


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    run_id: str
    version: tuple[int, ...]
    aof_enabled: bool
    maxmemory_policy: str
    appendfsync: str | None
    """None where the server forbids CONFIG."""
    still_starting: str
    """Why nothing can be said yet: the data is being loaded, or the first append-only file written."""
    is_primary: bool = True

    @classmethod
    def parse(cls, info: bytes, config: Mapping[str, str] | None) -> ServerFacts:
        """Read the replies of ``INFO`` and of ``CONFIG GET`` (None where it is forbidden)."""
        lines = info.decode("utf-8", "replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
        version = tuple(int(part) for part in fields.get("redis_version", "0").split(".") if part.isdigit())
        return cls(
            run_id=fields.get("run_id", ""),
            version=version,
            aof_enabled=fields.get("aof_enabled") == "1",
            maxmemory_policy=fields.get("maxmemory_policy", ""),
            appendfsync=None if config is None else config.get("appendfsync"),
            still_starting=_still_starting(fields),
            is_primary=fields.get("role") != "slave",
        )


def _still_starting(fields: Mapping[str, str]) -> str:
    if "1" in (fields.get("loading"), fields.get("async_loading")):
        return "it is loading its data"
    # Switched on at run time, the file keeps nothing until its first base is complete.
    first_base = fields.get("aof_enabled") == "1" and fields.get("aof_base_size") == "0"
    if first_base and "1" in (fields.get("aof_rewrite_in_progress"), fields.get("aof_rewrite_scheduled")):
        return "it is writing its first append-only file"
    return ""


def check_server(
    facts: ServerFacts,
    *,
    durability: Durability,
    assume_appendfsync: Literal["everysec", "always"] | None,
    server: str,
) -> None:
    """Refuse a server that cannot keep ``durability`` (design: "Durability is chosen once").

    Raises:
        ConfigurationError: a server older than 7.0, whose scripts have no flags.
        DurabilityError: the server could lose or evict what it acknowledged; names the line to set.

    """
    if facts.version < OLDEST_VERSION:
        shown = ".".join(map(str, facts.version))
        raise ConfigurationError(f"{server} is version {shown}; Redis 7.0, Valkey 7.2 or newer is needed")
    if facts.maxmemory_policy != "noeviction":
        raise DurabilityError(
            f"{server} may evict captured tokens (maxmemory-policy {facts.maxmemory_policy}); "
            "set `maxmemory-policy noeviction`"
        )
    if durability == "memory":
        return
    if not facts.aof_enabled:
        raise DurabilityError(
            f"{server} keeps no append-only file, as durability={durability!r} needs; "
            "set `appendonly yes`, or accept loss with durability='memory'"
        )
    appendfsync = facts.appendfsync or assume_appendfsync
    if appendfsync is None:
        raise DurabilityError(
            f"{server} forbids CONFIG GET, so its appendfsync is unknown; "
            "if you know it, say so with assume_appendfsync='everysec' or 'always'"
        )
    allowed = ("always",) if durability == "fsync" else ("everysec", "always")
    if appendfsync not in allowed:
        raise DurabilityError(
            f"{server} has appendfsync {appendfsync}, too weak for durability={durability!r}; "
            f"set `appendfsync {allowed[0]}`"
        )
