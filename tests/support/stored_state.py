"""The state of a stored rollout, by the names of its words: read, and rewritten as another hand would."""

from __future__ import annotations

from typing import Any

import redis

FIELD = b"s"
WORDS = (
    *("format", "incarnation", "status", "snapshot", "version", "seq"),
    *("records", "intents", "failures", "refusals", "blocks", "ids", "bytes"),
)
ENDS = "ends"
"""What follows the last word: raw bytes, which may hold spaces."""


def parse_state(line: bytes) -> dict[str, bytes]:
    return dict(zip((*WORDS, ENDS), line.split(b" ", len(WORDS)), strict=True))


def format_state(state: dict[str, bytes]) -> bytes:
    return b" ".join(state[name] for name in (*WORDS, ENDS))


def read_state(client: redis.Redis, key: bytes) -> dict[str, bytes]:
    line: Any = client.hget(key.decode(), FIELD.decode())
    return parse_state(line)


def change_state(client: redis.Redis, key: bytes, **words: bytes) -> None:
    """Give these words of the state other values, whether that makes sense or not."""
    changed = format_state(read_state(client, key) | words)
    client.hset(key.decode(), FIELD.decode(), changed)


def hash_fields(state: dict[str, bytes]) -> int:
    """How many fields the hash of a whole rollout in this state has."""
    counts = {name: int(state[name]) for name in WORDS[5:]}
    rows = 2 * counts["records"] + sum(counts[name] for name in ("intents", "failures", "refusals", "blocks"))
    return 1 + counts["seq"] + rows
