"""Which node of a Cluster holds which slots, as far as is known. No I/O here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from redis import exceptions as redis_errors
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from gym_capture_redis.errors import ConfigurationError
from gym_capture_redis.faults import NotConfirmedError, NotSettledError, is_transient, lacks_command
from gym_capture_redis.searches import Question, Search
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ServerSettings
from gym_capture_redis.wire import user_of

_FROM_WHERE_THE_SLOT_IS = (redis_errors.TryAgainError, NotConfirmedError, NotSettledError)


class SlotMap:
    """The primary of each slot.

    It is asked for when it is first needed, and again when a node is away or the Cluster is down; a slot that
    has moved is learned from the node that had it.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._named = settings.url.addresses
        self._user = user_of(settings)
        self._slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._stale = True

    def address_of(self, key: bytes) -> Address | None:
        """The primary of the key's slot. None where the map must be asked for first."""
        return None if self._stale else self._slots[key_slot(key)]

    def holds(self, address: Address, key: bytes) -> bool:
        """Whether the key's slot is there by the newest map, which may be an old one."""
        return self._slots[key_slot(key)] == address

    def addresses(self) -> set[Address | None]:
        """All that hold slots."""
        return set(self._slots)

    def load(self, known: Iterable[Address]) -> Search[None]:
        """Learn the whole map from the ``known`` nodes or those of the URL.

        Raises:
            redis.exceptions.RedisError, OSError: no node could tell.
            ConfigurationError: one is no node of a Cluster.

        """
        last: Exception = redis_errors.ClusterDownError("no node knows all slots")
        # In random order, so that one with an old view is not asked again and again.
        to_ask = list({*known, *self._named})
        random.shuffle(to_ask)
        for address in to_ask:
            answer = yield Question(address, ("CLUSTER", "SLOTS"), **self._user)
            if isinstance(answer, Exception):
                if lacks_command(answer):
                    raise ConfigurationError(f"{address} is no node of a Cluster; use redis://")
                if not is_transient(answer):
                    raise answer
                last = answer
                continue
            slots = _read_slots(answer, address)
            if any(slots):
                self._slots, self._stale = slots, False
                return
        raise last

    def learn(self, error: BaseException, asked: Address) -> Address | None:
        """Learn where a slot is, from what a step met. A node to ask this once, while a slot is moving."""
        if isinstance(error, redis_errors.AskError):
            # A node that does not know its own host leaves it out.
            address = Address(error.host or asked.host, error.port)
            if not isinstance(error, redis_errors.MovedError):
                return address
            self._slots[error.slot_id] = address
        elif is_transient(error) and not isinstance(error, _FROM_WHERE_THE_SLOT_IS):
            self._stale = True
        return None


def _read_slots(answer: Any, asked: Address) -> list[Address | None]:
    """The primary of each slot, from the reply of ``CLUSTER SLOTS``."""
    slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, address in _ranges(answer, asked):
        slots[first : last + 1] = [address] * (last + 1 - first)
    return slots


def _ranges(answer: Any, asked: Address) -> Iterator[tuple[int, int, Address]]:
    try:
        for first, last, (host, port, *_), *_ in answer:
            # No host: the same as that of the node that was asked.
            yield int(first), int(last), Address(host.decode() if host else asked.host, int(port))
    except (TypeError, ValueError, AttributeError):
        raise redis_errors.InvalidResponse("not a map of slots") from None
