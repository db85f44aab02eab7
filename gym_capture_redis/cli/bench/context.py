"""What every section is given: options, servers, records, progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from gym_capture_redis.cli.bench.peers.bare_redis import StoredSizes, measure_stored_sizes
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.servers import Servers
from gym_capture_redis.cli.bench.workload import Recipe, Workload
from gym_capture_redis.cli.report import progress_bar


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    recipe: Recipe
    rounds: int
    workers: tuple[int, ...]
    sections: tuple[str, ...]
    quick: bool


@dataclass
class Bench:
    """One run. ``mark`` is in the name of every key that it writes; ``directory`` is its own."""

    options: Options
    console: Console
    servers: Servers
    workload: Workload
    directory: Path
    mark: str
    _sizes: StoredSizes | None = field(default=None, repr=False)

    def ours(self) -> OurTransport:
        """This package on the server that is measured."""
        return OurTransport(self.servers.main, self.mark)

    async def stored_sizes(self) -> StoredSizes:
        """Bytes that this package stores for each call of the workload, found out once."""
        if self._sizes is None:
            self._sizes = await measure_stored_sizes(self.ours(), self.workload.rollouts)
        return self._sizes

    def progress(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        """A bar on a terminal, one line elsewhere; yields what advances it."""
        return progress_bar(self.console, what, total)
