"""Searches for the server that holds a rollout: whom to ask, and what the answers mean. No I/O here.

A search is a generator of questions that is sent the answers; async and sync clients follow the same ones.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeVar

from gym_capture_redis.server_url import Address

ASK_TIMEOUT_S = 1.0
"""One that is away must leave time to ask the others."""

T = TypeVar("T")


class Question(NamedTuple):
    """A command to a server, over a connection of its own."""

    server: Address
    words: tuple[str, ...]
    username: str | None
    password: str | None


Search = Generator[Question, Any, T]
"""Each question is answered with the reply, or with the exception that came instead."""
