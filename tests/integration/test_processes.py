"""One object in several event loops, threads and processes: each gets its own connections and answers."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import CALLS_PER_ROUND, payload, read_back, write_calls, write_from_a_process
from support.servers import RealServer

from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

TESTS = Path(__file__).parents[1]
# Python 3.12 and newer warn of any fork with threads about; that one works is what the test shows.
FORK_WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
PROCESSES = 8
THREADS = 8


def clients(server: RealServer, namespace: str) -> tuple[RedisTokenSink, RedisTokenSource]:
    return (
        RedisTokenSink(server.url, namespace=namespace, timeout_s=60),
        RedisTokenSource(server.url, namespace=namespace, timeout_s=60),
    )


def test_one_object_works_in_one_loop_after_the_other(real_server: RealServer, namespace: str) -> None:
    sink, source = clients(real_server, namespace)

    async def write(worker: str, *, close: bool) -> None:
        await write_calls(sink, "r", worker, 10)
        if close:
            await sink.close()

    asyncio.run(write("a", close=True))
    asyncio.run(write("b", close=False))  # the loop ends without a close
    asyncio.run(write("c", close=True))
    calls = asyncio.run(read_back(source, "r"))
    assert calls == {f"{worker}.{number}" for worker in "abc" for number in range(10)}


def test_one_object_works_in_two_loops_at_once(real_server: RealServer, namespace: str) -> None:
    sink, source = clients(real_server, namespace)
    met = threading.Barrier(2)

    async def work(worker: str) -> set[str]:
        await sink.begin_call(f"own.{worker}", f"{worker}.first")
        await asyncio.to_thread(met.wait)
        for turn in range(10):
            await write_calls(sink, "shared", f"{worker}.{turn}", 10)
        await write_calls(sink, f"own.{worker}", worker, 10)
        await sink.put(payload(f"own.{worker}", f"{worker}.first"))
        await asyncio.to_thread(met.wait)
        own = await read_back(source, f"own.{worker}")
        await sink.close()
        await source.close()
        return own

    with ThreadPoolExecutor(2) as threads:
        owns = list(threads.map(lambda worker: asyncio.run(work(worker)), ["a", "b"]))
    assert owns == [{f"{worker}.first", *(f"{worker}.{n}" for n in range(10))} for worker in "ab"]
    calls = asyncio.run(read_back(source, "shared"))
    assert calls == {f"{w}.{turn}.{n}" for w in "ab" for turn in range(10) for n in range(10)}


def test_closing_in_one_loop_leaves_the_connections_of_another_alone(
    valkey9: RealServer, namespace: str
) -> None:
    sink, source = clients(valkey9, namespace)
    used, closed = threading.Event(), threading.Event()

    async def stays() -> None:
        await write_calls(sink, "r", "before", 5)
        executor = sink._executors.get()
        used.set()
        await asyncio.to_thread(closed.wait)
        await write_calls(sink, "r", "after", 5)
        assert sink._executors.get() is executor

    async def leaves() -> None:
        await asyncio.to_thread(used.wait)
        await write_calls(sink, "r", "other", 5)
        await sink.close()
        closed.set()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(asyncio.run, stays()), threads.submit(asyncio.run, leaves())]:
            done.result()
    assert len(asyncio.run(read_back(source, "r"))) == 15


def test_many_short_loops_in_many_threads_share_one_object(valkey9: RealServer, namespace: str) -> None:
    sink, source = clients(valkey9, namespace)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # let the threads meet wherever they can
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            done = [
                threads.submit(asyncio.run, write_calls(sink, "r", f"w{number}", 2))
                for number in range(THREADS * 12)
            ]
            for future in done:
                future.result()
    finally:
        sys.setswitchinterval(interval)
    assert len(asyncio.run(read_back(source, "r"))) == THREADS * 12 * 2


def test_a_loop_that_begins_while_another_thread_looks_for_closed_ones_is_not_forgotten(
    valkey9: RealServer, namespace: str
) -> None:
    sink, _ = clients(valkey9, namespace)
    began, looked = threading.Event(), threading.Event()

    async def newcomer() -> bool:
        executor = sink._executors.get()
        began.set()
        await asyncio.to_thread(looked.wait)
        return sink._executors.get() is executor

    class Loop(asyncio.SelectorEventLoop):
        """A loop that is asked whether it is closed just when another thread begins to use the sink."""

        def is_closed(self) -> bool:
            if not newcomers and threading.current_thread() is threading.main_thread():
                newcomers.append(threads.submit(asyncio.run, newcomer()))
                began.wait(timeout=1)  # bounded: an implementation with a lock lets it begin afterwards
            return super().is_closed()

    async def look() -> None:
        sink._executors.get()

    newcomers: list[Future[bool]] = []
    other = Loop()
    sink._executors._executors[other] = sink._executors._make()
    with ThreadPoolExecutor(1) as threads:
        asyncio.run(look())
        looked.set()
        assert [future.result() for future in newcomers] == [True]
    other.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_parent_and_child_both_go_on_with_answers_of_their_own(
    real_server: RealServer, namespace: str
) -> None:
    done = subprocess.run(
        [sys.executable, *FORK_WARNINGS, "-m", "support.processes", real_server.url, namespace],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.stdout) == ("", "child exit 0\n")
    _, source = clients(real_server, namespace)
    assert len(asyncio.run(read_back(source, "shared"))) == CALLS_PER_ROUND


def test_spawned_processes_build_their_sinks_from_a_pickled_factory_and_write_one_rollout(
    valkey9: RealServer, namespace: str
) -> None:
    factory = functools.partial(RedisTokenSink, valkey9.url, namespace=namespace, timeout_s=60)
    context = multiprocessing.get_context("spawn")
    with context.Pool(PROCESSES) as pool:
        pids = pool.starmap(
            write_from_a_process,
            [(factory, "r", f"w{number}", CALLS_PER_ROUND) for number in range(PROCESSES)],
            chunksize=1,
        )
        pool.close()
        pool.join()
    assert os.getpid() not in pids
    _, source = clients(valkey9, namespace)
    calls = asyncio.run(read_back(source, "r"))
    assert calls == {f"w{worker}.{n}" for worker in range(PROCESSES) for n in range(CALLS_PER_ROUND)}
