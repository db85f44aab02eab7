"""Can the server keep what the settings promise, and how? Pure: reads the replies of INFO and CONFIG GET."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gym_capture_redis.errors import ConfigurationError, DurabilityError
from gym_capture_redis.server_url import Topology
from gym_capture_redis.settings import Durability, ServerSettings

OLDEST_VERSION = (7, 0)

FIRST_WITH_HONEST_WAITAOF = (8, 0)
"""Of Redis. Valkey's, and that of earlier Redis, answers before the fsync under ``everysec``."""

CONFIG_NAMES = ("appendfsync", "no-appendfsync-on-rewrite", "min-replicas-to-write")

_NEARLY_FULL = 0.9


class Confirming(NamedTuple):
    """A command that waits for what was sent before it on the same connection.

    Its last word, the time to wait, is left out. It answers with a count, which must be ``least``; that of
    ``WAITAOF`` is the server itself.
    """

    words: tuple[str | int, ...]
    least: int


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    run_id: str
    """Which process it is."""
    version: tuple[int, ...]
    aof_enabled: bool
    maxmemory_policy: str
    appendfsync: str | None
    """None where the server forbids CONFIG."""
    still_starting: str
    """Why nothing can be said yet: the data is being loaded, or the first append-only file written."""
    is_primary: bool = True
    is_sentinel: bool = False
    is_cluster_node: bool = False
    uptime_s: float = 0.0
    followed: str = ""
    """The replication id of the server with whose data it went on when it was promoted last."""
    is_valkey: bool = False
    pauses_fsync: bool = False
    """Whether it leaves out its fsyncs while it rewrites the append-only file."""
    connected_replicas: int = 0
    min_replicas_to_write: int = 0
    used_memory: int = 0
    maxmemory: int = 0

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
            is_sentinel="sentinel" in (fields.get("redis_mode"), fields.get("server_mode")),  # Redis, Valkey
            is_cluster_node=fields.get("cluster_enabled") == "1",
            uptime_s=float(fields.get("uptime_in_seconds", 0)),
            followed=replid2 if (replid2 := fields.get("master_replid2", "")).strip("0") else "",
            is_valkey=fields.get("server_name") == "valkey",
            pauses_fsync=config is not None and config.get("no-appendfsync-on-rewrite") == "yes",
            connected_replicas=int(fields.get("connected_slaves", 0)),
            min_replicas_to_write=int(config.get("min-replicas-to-write", 0)) if config else 0,
            used_memory=int(fields.get("used_memory", 0)),
            maxmemory=int(fields.get("maxmemory", 0)),
        )


def _still_starting(fields: Mapping[str, str]) -> str:
    if "1" in (fields.get("loading"), fields.get("async_loading")):
        return "it is loading its data"
    # Switched on at run time, the file keeps nothing until its first base is complete.
    first_base = fields.get("aof_enabled") == "1" and fields.get("aof_base_size") == "0"
    if first_base and "1" in (fields.get("aof_rewrite_in_progress"), fields.get("aof_rewrite_scheduled")):
        return "it is writing its first append-only file"
    return ""


def check_kind(facts: ServerFacts, *, topology: Topology, server: str) -> None:
    """Refuse a server of another kind than the URL says.

    Raises:
        ConfigurationError: a Sentinel, or a node of a Cluster; names the URL to use.

    """
    if facts.is_sentinel:
        raise ConfigurationError(
            f"{server} is a Sentinel; use redis+sentinel://host:port/service, with the name of its service"
        )
    if facts.is_cluster_node and topology != "cluster":
        raise ConfigurationError(f"{server} is a node of a Cluster; use redis+cluster://host:port")


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
            "set `appendonly yes`, or accept loss with durability='memory' where it can be chosen"
        )
    appendfsync = facts.appendfsync or assume_appendfsync
    if appendfsync is None:
        raise DurabilityError(
            f"{server} forbids CONFIG GET, so its appendfsync is unknown; "
            "if you know it, say so with assume_appendfsync='everysec' or 'always'"
        )
    if durability == "fsync" and facts.pauses_fsync:
        raise DurabilityError(
            f"{server} leaves out its fsyncs while it rewrites the append-only file, too weak for "
            "durability='fsync'; set `no-appendfsync-on-rewrite no`"
        )
    allowed = ("always",) if durability == "fsync" else ("everysec", "always")
    if appendfsync not in allowed and not waits_for_fsync(facts, durability, appendfsync):
        raise DurabilityError(
            f"{server} has appendfsync {appendfsync}, too weak for durability={durability!r}; "
            f"set `appendfsync {allowed[0]}`"
        )


def waits_for_fsync(facts: ServerFacts, durability: Durability, appendfsync: str | None) -> bool:
    """Whether each step must wait with ``WAITAOF`` for the fsync that the server makes once a second."""
    can = facts.version >= FIRST_WITH_HONEST_WAITAOF and not facts.is_valkey
    return durability == "fsync" and appendfsync == "everysec" and can


def confirming_commands(facts: ServerFacts, settings: ServerSettings) -> list[Confirming]:
    """What is sent behind steps to wait until they are as durable as promised."""
    commands = []
    appendfsync = facts.appendfsync or settings.assume_appendfsync
    if waits_for_fsync(facts, settings.durability, appendfsync):
        commands.append(Confirming(("WAITAOF", 1, 0), 1))
    if settings.replicas:
        commands.append(Confirming(("WAIT", settings.replicas), settings.replicas))
    return commands


def warnings_about(facts: ServerFacts, *, topology: Topology, replicas: int) -> dict[str, str]:
    """What is not safe, though the promise can be kept: what to tell the operator, with the line to set.

    Each under the name of its kind, as its text may change with every look.
    """
    told = {}
    fails_over = topology != "standalone" and facts.connected_replicas > 0
    if fails_over and not replicas and not facts.min_replicas_to_write:
        told["failover"] = (
            "a primary that is cut off from its replicas goes on acknowledging what a failover discards; "
            "set `min-replicas-to-write 1`, or the setting replicas=1"
        )
    if facts.maxmemory and facts.used_memory > _NEARLY_FULL * facts.maxmemory:
        told["memory"] = (
            f"it uses {facts.used_memory / facts.maxmemory:.0%} of its maxmemory, beyond which records are "
            "refused; raise `maxmemory`, or let the trainer drop what it has consumed"
        )
    return told


class ServersSeen:
    """The servers that a process has met, and when each has had time to get back what it forgot."""

    def __init__(self) -> None:
        self._newest: dict[Hashable, str] = {}
        self._met_at_s: dict[str, float] = {}
        self._late: set[str] = set()
        self._followed: dict[str, str] = {}

    def name(self, facts: ServerFacts) -> str:
        """Name of a process and of whose writes it has: promoted again, it may lack what it had acknowledged.

        A primary takes another replication id when its first replica comes, and forgets whom it followed when
        it has had no replica for long; it is the same one all the same.
        """
        followed = facts.followed or self._followed.get(facts.run_id, "")
        if not followed:
            return facts.run_id
        self._followed[facts.run_id] = followed
        return f"{facts.run_id}:{followed}"

    def meet(self, place: Hashable, facts: ServerFacts, *, settle_s: float) -> float:
        """Note a server that was found at ``place``, and say when it is settled, in ``time.monotonic``.

        One that was started or promoted a moment ago may lack its newest steps, and the workers that know of
        them need ``settle_s`` to put them back.
        """
        now_s, name = time.monotonic(), self.name(facts)
        before, self._newest[place] = self._newest.get(place), name
        met_at_s = self._met_at_s.setdefault(name, now_s)
        # Its own clock does not count where it ran as a replica, or loaded its data, for a part of the time.
        if facts.followed or before not in (None, name):
            self._late.add(name)
        age_s = now_s - met_at_s
        return now_s + settle_s - (age_s if name in self._late else max(age_s, facts.uptime_s))

    def meet_starting(self, place: Hashable) -> None:
        """Note that the server at ``place`` is still loading its data."""
        self._newest[place] = ""
