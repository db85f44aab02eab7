"""What a worker remembers of staged chains: it saves reading their beginnings again, never correctness."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gym_capture_redis.packing import Array

_LINK_BYTES = 1_000
"""About what Python needs for a link beside its ids."""


class Link(NamedTuple):
    """The tokens that one staged call adds, and the chain hashes before and after them."""

    parent_hash: str | None
    chain_hash: str
    ids: Array

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return _LINK_BYTES + self.ids.nbytes


class _Contents:
    """All that one process remembers."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.links: OrderedDict[str, Link] = OrderedDict()
        self.nbytes = 0


class ChainCache:
    """The newest links by staging key, up to about ``max_bytes``. Used from many threads; empty after a fork.

    A chain is kept as its links, so that chains that branch share what they have in common.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._own = _Contents()

    def links(self, chain: Iterable[str]) -> dict[str, Link]:
        """Those of the chain that are here, which are the newest now."""
        contents = self._contents()
        with contents.lock:
            found = {key: contents.links[key] for key in chain if key in contents.links}
            for key in found:
                contents.links.move_to_end(key)
        return found

    def remember(self, links: Mapping[str, Link]) -> None:
        """Keep these links, in place of others under their keys; the oldest make room for them."""
        contents = self._contents()
        with contents.lock:
            for key, link in links.items():
                old = contents.links.pop(key, None)
                contents.nbytes += link.nbytes - (old.nbytes if old else 0)
                contents.links[key] = link
            while contents.nbytes > self._max_bytes and contents.links:
                _, oldest = contents.links.popitem(last=False)
                contents.nbytes -= oldest.nbytes

    def _contents(self) -> _Contents:
        # After a fork the lock may be held by a thread of the parent, half-way through a change.
        if self._own.pid != os.getpid():
            self._own = _Contents()
        return self._own
