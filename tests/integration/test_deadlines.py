"""Every call ends at its deadline or at ``close``, whatever threads, servers and event loops do meanwhile."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.sample_entries import exact_dump, sample_entry
from support.sequences import random_ids
from support.servers import RealServer

from gym_capture_redis import codec, executor, faults, retry, taking
from gym_capture_redis.errors import BackendUnavailableError
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

PATIENCE_S = 30.0
"""Far longer than anything below takes: only a call that hangs reaches it."""

LARGE = taking.LARGE_TOKENS + 1


@pytest.fixture
def server(valkey9: RealServer) -> Iterator[RealServer]:
    """A server of the test's own, to be killed."""
    with RealServer(valkey9.binary) as own:
        yield own


def large_entry(rollout: str = "r", call: str = "c", **fields: Any) -> Any:
    """An entry that is encoded and decoded on a thread."""
    return sample_entry(rollout, call, prompt_token_ids=random_ids(LARGE), routed_experts=None, **fields)


class HeldWork:
    """Work on a thread that has begun, and goes on when it is told to."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._begun = threading.Event()
        self._go_on = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._begun.set()
        assert self._go_on.wait(PATIENCE_S)
        return self._work(*args, **kwargs)

    async def until_it_has_begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, PATIENCE_S)

    def go_on(self) -> None:
        self._go_on.set()


@pytest.fixture
def held_encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWork]:
    held = HeldWork(codec.encode_taken)
    monkeypatch.setattr(codec, "encode_taken", held)
    yield held
    held.go_on()


# Threads


async def test_encoding_that_does_not_end_costs_a_put_its_deadline_and_no_more(
    valkey9: RealServer, namespace: str, held_encoding: HeldWork
) -> None:
    async with (
        RedisTokenSink(valkey9.url, namespace=namespace, timeout_s=0.3) as sink,
        RedisTokenSource(valkey9.url, namespace=namespace) as source,
    ):
        await sink.begin_call("r", "c")
        async with asyncio.timeout(PATIENCE_S / 2):
            with pytest.raises(BackendUnavailableError, match=r"did not end within 0\.3 s.*rollout r"):
                await sink.put(large_entry())
            await sink.begin_call("r", "other")
        assert (await source.freeze("r")).incomplete
        held_encoding.go_on()


async def test_user_code_that_fills_the_default_threads_delays_no_large_record(
    valkey9: RealServer, namespace: str
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    release = threading.Event()
    blocker = loop.run_in_executor(None, release.wait)
    try:
        async with (
            asyncio.timeout(PATIENCE_S),
            RedisTokenSink(valkey9.url, namespace=namespace) as sink,
            RedisTokenSource(valkey9.url, namespace=namespace) as source,
        ):
            await sink.put(large_entry())
            await sink.put(sample_entry("r", "with-experts"))
            for freeze in (source.freeze, source.freeze_arrays):
                assert len((await freeze("r")).entries) == 2
        assert not blocker.done()
    finally:
        release.set()
        await blocker


@pytest.mark.parametrize("as_arrays", [False, True])
async def test_an_entry_changed_while_it_is_encoded_is_stored_as_it_was_at_the_call(
    valkey9: RealServer, namespace: str, held_encoding: HeldWork, as_arrays: bool
) -> None:
    entry = large_entry(note={"kept": [1]})
    if as_arrays:
        entry.prompt_token_ids = np.array(entry.prompt_token_ids)
        entry.generation_log_probs = np.array(entry.generation_log_probs)
    expected = exact_dump(large_entry(note={"kept": [1]}))
    async with (
        RedisTokenSink(valkey9.url, namespace=namespace) as sink,
        RedisTokenSource(valkey9.url, namespace=namespace) as source,
    ):
        put = asyncio.create_task(sink.put(entry))
        await held_encoding.until_it_has_begun()
        entry.prompt_token_ids[0] += 1
        entry.generation_log_probs[0] = -9.0
        entry.generation_token_ids.append(7)
        entry.output_items.append({"type": "late"})
        entry.note["kept"].append(2)
        entry.model = "other"
        held_encoding.go_on()
        await put
        (stored,) = (await source.freeze("r")).entries
        assert exact_dump(stored) == expected


# Closing


async def test_closing_between_two_tries_ends_the_call_and_leaves_nothing_behind(
    server: RealServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()

    def is_transient(error: BaseException) -> bool:
        failed.set()  # the pause before the next try comes next, without another step of the loop
        return faults.is_transient(error)

    monkeypatch.setattr(executor, "is_transient", is_transient)
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(random, "uniform", lambda _low, high: high)
    sink = RedisTokenSink(server.url, namespace=namespace, timeout_s=PATIENCE_S)
    await sink.begin_call("r", "c")
    server.kill()
    put = asyncio.create_task(sink.put(sample_entry("r", "c")))
    await failed.wait()
    await sink.close()
    assert not put.done(), "the test missed the pause"
    await asyncio.to_thread(server.start)
    with pytest.raises(BackendUnavailableError, match="closed"):
        await put
    assert [task.get_name() for task in asyncio.all_tasks() if "lane" in task.get_name()] == []
    with server.client() as client:
        assert len(client.client_list()) == 1

    await sink.put(sample_entry("r", "c"))
    await sink.close()
    async with RedisTokenSource(server.url, namespace=namespace) as source:
        assert len((await source.freeze("r")).entries) == 1


# Event loops that are gone

GONE_WITHOUT_CLOSE = """
import asyncio, gc, sys
from gym_capture_redis import RedisTokenSink, RedisTokenSource

url, namespace, how = sys.argv[1:]
sink = RedisTokenSink(url, namespace=namespace)
source = RedisTokenSource(url, namespace=namespace)

async def use(rollout):
    await sink.begin_call(rollout, "c")
    await sink.mark_incomplete(rollout, "c")
    await source.freeze(rollout)

for rollout in ("first", "second"):
    if how == "asyncio.run":
        asyncio.run(use(rollout))
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(use(rollout))
        loop.close()
        del loop
    gc.collect()
del sink, source
gc.collect()
print("done")
"""


@pytest.mark.parametrize("how", ["asyncio.run", "loop.close"])
def test_a_loop_that_ends_without_close_leaves_no_errors_of_its_lanes(
    valkey9: RealServer, namespace: str, how: str
) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", GONE_WITHOUT_CLOSE]
    child = subprocess.run(
        [*command, valkey9.url, namespace, how], capture_output=True, text=True, check=False, timeout=60
    )
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr
    for phrase in ("ignored GeneratorExit", "Event loop is closed", "was never awaited"):
        assert phrase not in child.stderr
    # A loop closed under running tasks reports them, and their sockets, by itself.
    assert how == "loop.close" or not child.stderr, child.stderr
