"""A primary with one replica, watched by three Sentinels; all of them real, on 127.0.0.1."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import redis
from support.polling import wait_until
from support.servers import RealServer

SERVICE = "service"
QUORUM = 2
SENTINELS = 3

DOWN_AFTER_MS = 1_000
"""Half as long, and a busy machine looks like a dead server now and then."""

FAILOVER_TIMEOUT_MS = 2_000
"""A vote that is split is held again after twice this time."""

CHANGE_TIMEOUT_S = 40.0
"""For anything that the group does by itself: to meet, to promote, to demote, to catch up."""

HASTE = (
    *("info-period", "400", "publish-period", "200", "ask-period", "200"),
    *("tilt-trigger", "20000", "min-link-reconnect-period", "200"),
)
"""Sentinels look at everything more often than they would, and a busy machine does not confuse them."""


class ConfiguredServer(RealServer):
    """A server with a configuration file, which it or a Sentinel may rewrite: roles survive a restart."""

    @property
    def file(self) -> Path:
        return self.directory / "conf"

    def text(self) -> str:
        return "".join(f"{name} {value or chr(34) * 2}\n" for name, value in self.config.items())

    def arguments(self) -> list[str]:
        if not self.file.exists():
            self.file.write_text(self.text())
        return [str(self.file)]


class SentinelServer(ConfiguredServer):
    """One Sentinel that watches the primary on ``watched_port``."""

    def __init__(self, binary: Path, watched_port: int) -> None:
        super().__init__(binary)
        self.watched_port = watched_port

    def text(self) -> str:
        names = ("port", "bind", "unixsocket", "dir", "logfile")
        return "".join(f"{name} {self.config[name]}\n" for name in names) + (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.watched_port} {QUORUM}\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}\n"
        )

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--sentinel"]

    def start(self) -> Self:
        super().start()
        self.ask("debug", *HASTE)
        return self

    def ask(self, *command: str) -> Any:
        with self.client() as client:
            return client.execute_command("sentinel", *command)

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def facts(self) -> dict[str, str]:
        """What this Sentinel knows of the primary."""
        pairs = [word.decode() for word in self.ask("master", SERVICE)]
        return dict(zip(pairs[::2], pairs[1::2], strict=True))


class SentinelGroup:
    """Started with ``with``; ready when the replica has caught up and all Sentinels know each other."""

    def __init__(self, binary: Path, **config: str) -> None:
        config = {"repl_diskless_sync_delay": "0"} | config
        first = ConfiguredServer(binary, **config)
        second = ConfiguredServer(binary, replicaof=f"127.0.0.1 {first.port}", **config)
        self.servers = (first, second)
        self.sentinels = tuple(SentinelServer(binary, first.port) for _ in range(SENTINELS))
        self._running = contextlib.ExitStack()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    def primary(self) -> RealServer:
        """The one that the Sentinels name."""
        port = int(self.sentinels[0].facts()["port"])
        return next(server for server in self.servers if server.port == port)

    def replica(self) -> RealServer:
        primary = self.primary()
        return next(server for server in self.servers if server is not primary)

    def kill_primary(self) -> RealServer:
        """``kill -9`` the primary, wait until the replica is promoted, and return the dead one."""
        primary, replica = self.primary(), self.replica()
        primary.kill()
        self._wait_for_promotion(replica, lambda: self._is_promoted(replica))
        return primary

    def switch_over(self) -> None:
        """Have the Sentinels exchange primary and replica, and wait until they have."""
        replica = self.replica()

        def is_ordered_and_done() -> bool:
            # An order is given up where the replica is not known to be good in that moment.
            if self.primary() is not replica:
                self._order_failover()
            return self._is_promoted(replica)

        self._wait_for_promotion(replica, is_ordered_and_done)
        self.wait_for_replica()

    def revive(self) -> None:
        """Start what is dead again, and wait until it is a replica that has caught up."""
        for server in self.servers:
            if not server.is_running:
                server.start()
        self.wait_for_replica()

    def wait_for_replica(self) -> None:
        """Until primary and replica are of one mind, and a failover would succeed."""
        wait_until(self._is_whole, "the replica has caught up", timeout_s=CHANGE_TIMEOUT_S)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as running:
            for server in (*self.servers, *self.sentinels):
                running.enter_context(server)
            self.wait_for_replica()
            self._running = running.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _order_failover(self) -> None:
        try:
            self.sentinels[0].ask("failover", SERVICE)
        except redis.ResponseError as error:  # one is under way, or the replica is not known to be good yet
            if not str(error).startswith(("INPROG", "NOGOODSLAVE")):
                raise

    def _is_promoted(self, server: RealServer) -> bool:
        with server.client() as client:
            role: Any = client.role()
        named = {int(sentinel.facts()["port"]) for sentinel in self.sentinels}
        return role[0] == b"master" and named == {server.port}

    def _wait_for_promotion(self, server: RealServer, is_promoted: Callable[[], bool]) -> None:
        try:
            wait_until(is_promoted, f"port {server.port} is the primary", timeout_s=CHANGE_TIMEOUT_S)
        except TimeoutError as error:
            logs = (sentinel.log() for sentinel in self.sentinels)
            raise TimeoutError("\n".join([str(error), *logs])) from None

    def _is_whole(self) -> bool:
        with self.primary().client() as primary, self.replica().client() as replica:
            above: Any = primary.info("replication")
            below: Any = replica.info("replication")
        return (
            above["role"] == "master"
            and above["connected_slaves"] == 1
            and below["role"] == "slave"
            and below["master_link_status"] == "up"
            and all(_knows_the_group(sentinel.facts()) for sentinel in self.sentinels)
            and len({sentinel.facts()["port"] for sentinel in self.sentinels}) == 1
        )


def _knows_the_group(facts: dict[str, str]) -> bool:
    return (facts["num-slaves"], facts["num-other-sentinels"], facts["flags"]) == (
        "1",
        str(SENTINELS - 1),
        "master",
    )
