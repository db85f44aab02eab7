"""Drop, retire and delete: odd arguments harm nobody else, and the report says what was really removed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any

import pytest
from support.sample_entries import sample_entry
from support.servers import RealServer

from gym_capture_redis import scripts
from gym_capture_redis.errors import TokenCaptureRetiredError
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.scripts import Step
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.subject import Subject

MANY = 2_000


@dataclass
class Clients:
    """A sink and a source with one connection, so that steps at the same time share a pipeline."""

    sink: RedisTokenSink
    source: RedisTokenSource
    namespace: str


@pytest.fixture
async def clients(real_server: RealServer, namespace: str) -> AsyncIterator[Clients]:
    settings: dict[str, Any] = {"namespace": namespace, "timeout_s": 60, "connections": 1}
    async with (
        RedisTokenSink(real_server.url, **settings) as sink,
        RedisTokenSource(real_server.url, **settings) as source,
    ):
        yield Clients(sink, source, namespace)


# Odd arguments of drop


async def drop_among_others(clients: Clients, **arguments: Any) -> Any:
    """What a drop came to; the steps in the same pipeline must not be harmed, nor its own rollout."""
    await clients.sink.put(sample_entry("odd", "c"))
    frozen = await clients.source.freeze("odd")
    asked: dict[str, Any] = {"snapshot_id": frozen.snapshot_id, "version": frozen.version} | arguments
    steps: list[Awaitable[Any]] = [
        clients.source.drop("odd", **asked),
        clients.source.freeze("other"),
        clients.source.retire(["unheard"]),
    ]
    outcomes: list[Any] = await asyncio.gather(*steps, return_exceptions=True)
    outcome, other, ended = outcomes
    assert (other.rollout_id, other.incomplete) == ("other", False)
    assert ended == {"removed": [], "absent": ["unheard"]}
    again = await clients.source.freeze("odd")
    assert (again.snapshot_id, len(again.entries)) == (frozen.snapshot_id, 1)
    return outcome


@pytest.mark.parametrize(
    "version", [-1, 0, 3, 2**53, 2**53 + 1, 2**64, 10**5_000, -(10**5_000), False], ids=hex
)
async def test_a_version_that_there_is_not_drops_nothing(clients: Clients, version: int) -> None:
    assert await drop_among_others(clients, version=version) is False


async def test_true_counts_as_one_as_it_does_everywhere_in_python(clients: Clients) -> None:
    assert await drop_among_others(clients, version=True) is False
    empty = await clients.source.freeze("never-heard-of")
    assert empty.version == 1
    assert await clients.source.drop("never-heard-of", snapshot_id=empty.snapshot_id, version=True) is True


@pytest.mark.parametrize("version", [1.0, "1", b"1", None, [1]], ids=repr)
async def test_a_version_of_another_type_is_refused(clients: Clients, version: Any) -> None:
    outcome = await drop_among_others(clients, version=version)
    assert isinstance(outcome, TypeError)
    assert f"not of type {type(version).__name__}" in str(outcome)


@pytest.mark.parametrize("snapshot_id", ["", "other", "\ud800", "a\0b", "x" * 10_000], ids=ascii)
async def test_an_id_that_there_is_not_drops_nothing(clients: Clients, snapshot_id: str) -> None:
    assert await drop_among_others(clients, snapshot_id=snapshot_id) is False


@pytest.mark.parametrize("snapshot_id", [5, b"id", None, True], ids=repr)
async def test_an_id_of_another_type_is_refused(clients: Clients, snapshot_id: Any) -> None:
    outcome = await drop_among_others(clients, snapshot_id=snapshot_id)
    assert isinstance(outcome, TypeError)
    assert f"not of type {type(snapshot_id).__name__}" in str(outcome)


# What is reported as removed


async def join(clients: Clients, rollout: str) -> None:
    """Make the rollout known and empty, as the first of the two steps of an unannounced put does."""
    executor = clients.sink._executors.get()
    call = scripts.join(rollout_key(clients.namespace, rollout), new_incarnation="0" * 32)
    await executor.run(call, Subject(rollout), deadline=executor.deadline())


def put_after_the_first_look(clients: Clients, monkeypatch: pytest.MonkeyPatch, rollout: str) -> None:
    executor = clients.source._executors.get()
    run = executor.run

    async def run_and_put(call: scripts.Call, *args: Any, **kwargs: Any) -> scripts.Reply:
        reply = await run(call, *args, **kwargs)
        if call.step is Step.PEEK:
            monkeypatch.setattr(executor, "run", run)
            await clients.sink.put(sample_entry(rollout, "c"))
        return reply

    monkeypatch.setattr(executor, "run", run_and_put)


@pytest.mark.parametrize(
    ("end", "known_before"), [("retire", True), ("retire", False), ("delete", True)], ids=str
)
async def test_what_was_put_between_the_two_steps_of_an_end_is_reported_as_removed(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, end: str, known_before: bool
) -> None:
    if known_before:
        await join(clients, "r")
    put_after_the_first_look(clients, monkeypatch, "r")
    assert await getattr(clients.source, end)(["r"]) == {"removed": ["r"], "absent": []}


async def test_what_was_put_after_delete_found_nothing_stays(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_after_the_first_look(clients, monkeypatch, "r")
    assert await clients.source.delete(["r"]) == {"removed": [], "absent": ["r"]}
    assert len((await clients.source.freeze("r")).entries) == 1


@pytest.mark.parametrize("end", ["retire", "delete"])
async def test_two_thousand_rollouts_end_in_one_call_and_each_is_reported(clients: Clients, end: str) -> None:
    rollouts = [f"r{number}" for number in range(MANY)]
    await asyncio.gather(*(clients.sink.begin_call(rollout, "c") for rollout in rollouts[::2]))
    ended = await getattr(clients.source, end)([*rollouts, *rollouts[:10]])
    assert ended == {"removed": rollouts[::2], "absent": rollouts[1::2]}
    if end == "delete":
        await clients.sink.begin_call(rollouts[0], "c")
        return
    for rollout in (rollouts[0], rollouts[1], rollouts[-1]):
        with pytest.raises(TokenCaptureRetiredError):
            await clients.sink.begin_call(rollout, "later")
