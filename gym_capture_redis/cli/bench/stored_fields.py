"""What puts leave in the hash of a rollout, learned by looking before and after: names and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from gym_capture_redis.cli.bench.drive import put_all
from gym_capture_redis.cli.bench.peers.ours import OurTransport
from gym_capture_redis.cli.bench.servers import Server
from gym_capture_redis.cli.bench.workload import Rollout

STATE_FIELD = b"s"
"""The one field that every put rewrites (docs/wire-format.md)."""

Fields = Mapping[bytes, bytes]


@dataclass(frozen=True)
class StoredCall:
    """As many fields as one put stores, and its entry, whose ids its caller has to pack."""

    rollout: int
    fields: Fields
    entry: Any

    @property
    def nbytes(self) -> int:
        """Bytes of all names and values."""
        return sum(len(name) + len(value) for name, value in self.fields.items())


@dataclass(frozen=True)
class Stored:
    """The fields of each rollout that were there before the puts, and what each put adds or changes."""

    announced: list[Fields]
    calls: list[StoredCall]
    """The first calls of all rollouts, then the second ones, as rollouts at the same time would put them."""


async def learn_stored_fields(ours: OurTransport, server: Server, rollouts: Sequence[Rollout]) -> Stored:
    """Announce and put all calls through this package, and read the hashes before and after the puts."""
    try:
        await ours.prepare(rollouts)
        announced = [_fields(server, ours.key(rollout)) for rollout in rollouts]
        await put_all(ours, rollouts)
        after = [_fields(server, ours.key(rollout)) for rollout in rollouts]
    finally:
        await ours.clear()
    dealt = [
        deal(number, rollout, announced[number], after[number]) for number, rollout in enumerate(rollouts)
    ]
    return Stored(announced, [call for turn in zip_longest(*dealt) for call in turn if call is not None])


def deal(number: int, rollout: Rollout, before: Fields, after: Fields) -> list[StoredCall]:
    """Deal out what is new or changed to the calls of the rollout, and the state to each of them."""
    new = [
        (name, value) for name, value in after.items() if name != STATE_FIELD and before.get(name) != value
    ]
    count = len(rollout)
    return [
        StoredCall(
            number,
            dict(new[index * len(new) // count : (index + 1) * len(new) // count])
            | {STATE_FIELD: after[STATE_FIELD]},
            entry,
        )
        for index, entry in enumerate(rollout)
    ]


def _fields(server: Server, key: bytes) -> Fields:
    found: Any = server.client.hgetall(key)
    return dict(found)
