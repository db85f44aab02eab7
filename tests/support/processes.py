"""What child processes of the tests run: importable, so that a spawned child finds it by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from support.sample_entries import exact_dump, sample_entry
from support.sequences import growing_conversation, random_ids

from gym_capture_redis.records import TokenEntry

CALLS_PER_ROUND = 40
SHARED_PROMPT = random_ids(2_000)


def payload(rollout: str, call: str) -> Any:
    """An entry that could be of no other call."""
    return sample_entry(rollout, call, prompt_token_ids=[*call.encode()], response_id=f"{rollout}/{call}")


async def write_calls(sink: Any, rollout: str, worker: str, calls: int) -> None:
    async def write(call: str) -> None:
        await sink.begin_call(rollout, call)
        await sink.put(payload(rollout, call))

    await asyncio.gather(*(write(f"{worker}.{number}") for number in range(calls)))


async def read_back(source: Any, rollout: str) -> set[str]:
    """Freeze, check that every record is that of its own call, and return the calls."""
    snapshot = await source.freeze(rollout)
    assert not snapshot.incomplete, snapshot.reasons
    for entry in snapshot.entries:
        assert exact_dump(entry) == exact_dump(payload(rollout, entry.model_call_id))
    return {entry.model_call_id for entry in snapshot.entries}


def write_from_a_process(make_sink: Callable[[], Any], rollout: str, worker: str, calls: int) -> int:
    """Target of a spawned process: one sink, one rollout."""

    async def main() -> None:
        async with make_sink() as sink:
            await write_calls(sink, rollout, worker, calls)

    asyncio.run(main())
    return os.getpid()


def conversation_of(rollout: str, worker: str, turns: int) -> list[TokenEntry]:
    """Calls of one worker: a prompt that all workers share, then a conversation of its own."""
    own = growing_conversation(turns, 300, seed=1 + sum(worker.encode()))
    return [
        sample_entry(rollout, f"{worker}.{number}", prompt_token_ids=SHARED_PROMPT + ids)
        for number, ids in enumerate(own)
    ]


def converse_from_a_process(make_sink: Callable[[], Any], rollout: str, worker: str, turns: int) -> int:
    """Target of a spawned process: one conversation, call by call."""

    async def main() -> None:
        async with make_sink() as sink:
            for entry in conversation_of(rollout, worker, turns):
                await sink.begin_call(rollout, entry.model_call_id)
                await sink.put(entry)

    asyncio.run(main())
    return os.getpid()


def stage_from_a_process(make_sink: Callable[[], Any], rollout: str, worker: str, calls: int) -> int:
    """Target of a spawned process: one staging sink, one rollout."""
    from support.staged_calls import staged_record

    with make_sink() as sink:
        for number in range(calls):
            sink.stage(staged_record(rollout, f"{worker}.{number}"), attachments={"pid": os.getpid()})
    return os.getpid()


def fork_and_go_on(url: str, namespace: str) -> None:
    """Use a sink and a source, fork, and go on in parent and child at once, with the same objects."""
    from gym_capture_redis.sink import RedisTokenSink
    from gym_capture_redis.source import RedisTokenSource

    sink, source = (
        RedisTokenSink(url, namespace=namespace, timeout_s=30),
        RedisTokenSource(url, namespace=namespace, timeout_s=30),
    )

    async def rounds(who: str) -> None:
        for turn in range(5):
            rollout = f"{who}.{turn}"
            await write_calls(sink, rollout, who, CALLS_PER_ROUND)
            assert len(await read_back(source, rollout)) == CALLS_PER_ROUND

    async def parent() -> int:
        await rounds("before")
        child = os.fork()
        if not child:
            # The child is a copy of a running loop; what it does, it does in a loop of its own.
            status = 1
            with contextlib.suppress(BaseException):
                asyncio.events._set_running_loop(None)
                status = run_child()
            os._exit(status)
        await rounds("parent")
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        await rounds("after")
        await sink.close()
        await source.close()
        return os.waitstatus_to_exitcode(status)

    def run_child() -> int:
        try:
            asyncio.run(child_rounds())
        except BaseException as error:  # noqa: BLE001 - the parent only sees the exit code
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            return 1
        return 0

    async def child_rounds() -> None:
        await rounds("child")
        await write_calls(sink, "shared", "child", CALLS_PER_ROUND)
        await sink.close()
        await source.close()

    print("child exit", asyncio.run(parent()))


if __name__ == "__main__":
    fork_and_go_on(*sys.argv[1:3])
