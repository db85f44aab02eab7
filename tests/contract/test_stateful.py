"""Random histories on a backend and on the model: both must tell the same story."""

from __future__ import annotations

import functools
import uuid
from typing import Any

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from support.servers import RealServer

from gym_capture_redis import RedisTokenSink, RedisTokenSource
from gym_capture_redis.testing import Clients, token_transport_machine


def tell_histories(url: str, durability: str, *, max_examples: int) -> None:
    """Compare histories, each in a namespace of its own."""

    def open_backend() -> Clients:
        options: dict[str, Any] = {"namespace": f"history-{uuid.uuid4().hex}", "durability": durability}
        return Clients(
            functools.partial(RedisTokenSink, url, **options),
            functools.partial(RedisTokenSource, url, **options),
        )

    run_state_machine_as_test(
        token_transport_machine(open_backend),
        settings=settings(max_examples=max_examples, stateful_step_count=25),
    )


def test_fakeredis_does_what_the_model_does() -> None:
    tell_histories("fakeredis://histories", "memory", max_examples=80)


def test_valkey_does_what_the_model_does(valkey9: RealServer) -> None:
    tell_histories(valkey9.url, "aof", max_examples=80)
