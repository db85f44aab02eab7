"""Puts and freezes recorded calls through this package, Gym's file store and bare redis-py, in one run."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import struct
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from redis.asyncio import Redis
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gym_capture_redis import CaptureError, RedisTokenSink, RedisTokenSource, TokenEntry, codec, gym_compat
from gym_capture_redis.blocks import TokenSequence
from gym_capture_redis.cli.served_calls import RecordedRollout, load_rollouts
from gym_capture_redis.embedded import EmbeddedServer
from gym_capture_redis.records import compute_digest

ATTEMPTS = 8
"""Attempts at each of the 8 recorded rollouts: 64 rollouts in flight, 1,496 calls."""

Rollout = list[Any]
"""The entries of one attempt, in order."""


class Transport(Protocol):
    """One contender: stores rollouts, then reads them back."""

    name: str

    async def announce(self, rollouts: list[Rollout]) -> None:
        """Whatever precedes generation; not measured as part of a put."""

    async def put_rollout(self, rollout: Rollout) -> None:
        """Put the calls of one rollout one after another."""

    async def freeze(self, rollout_id: str, calls: int) -> None:
        """Read one rollout back."""

    async def close(self) -> None:
        """Remove what was stored."""


class OurTransport:
    """``RedisTokenSink`` and ``RedisTokenSource``."""

    name = "gym-capture-redis"

    def __init__(self, url: str) -> None:
        namespace = f"bench-{uuid.uuid4().hex[:12]}"
        self._sink = RedisTokenSink(url, namespace=namespace)
        self._source = RedisTokenSource(url, namespace=namespace)
        self._rollout_ids: list[str] = []
        self.stored_bytes = 0

    async def announce(self, rollouts: list[Rollout]) -> None:
        self._rollout_ids = [rollout[0].rollout_id for rollout in rollouts]
        calls = (
            self._sink.begin_call(e.rollout_id, e.model_call_id) for rollout in rollouts for e in rollout
        )
        await asyncio.gather(*calls)

    async def put_rollout(self, rollout: Rollout) -> None:
        for entry in rollout:
            await self._sink.put(entry)

    async def freeze(self, rollout_id: str, calls: int) -> None:
        snapshot = await self._source.freeze(rollout_id)
        if snapshot.incomplete or len(snapshot.entries) != calls:
            raise RuntimeError(f"{rollout_id} came back incomplete: {snapshot.reasons}")
        self.stored_bytes += snapshot.stored_bytes

    async def close(self) -> None:
        await self._source.delete(self._rollout_ids)
        await self._sink.close()
        await self._source.close()


class GymFileStore:
    """Gym's ``TokenCaptureStore`` in a temporary directory."""

    name = "Gym file store"

    def __init__(self) -> None:
        store_class = gym_compat.gym_attribute("store", "TokenCaptureStore")
        if store_class is None:
            raise RuntimeError("nemo_gym is not importable")
        self._directory = tempfile.TemporaryDirectory(prefix="gym-capture-bench-")
        self._store = store_class(self._directory.name)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored lines."""
        return sum(path.stat().st_size for path in Path(self._directory.name).glob("*.tokens.jsonl"))

    async def announce(self, rollouts: list[Rollout]) -> None:
        """Nothing: its intents are not compared here."""

    async def put_rollout(self, rollout: Rollout) -> None:
        for entry in rollout:
            await self._store.put(entry)

    async def freeze(self, rollout_id: str, calls: int) -> None:
        snapshot = await self._store.freeze(rollout_id)
        if snapshot.incomplete or len(snapshot.entries) != calls:
            raise RuntimeError(f"{rollout_id} came back incomplete")

    async def close(self) -> None:
        self._directory.cleanup()


class BareRedis:
    """Plain ``HSET`` of the bytes that this package stores, one connection for each rollout in flight."""

    name = "bare redis-py"
    stored_bytes = 0

    def __init__(self, url: str) -> None:
        self._client = Redis.from_url(url, protocol=2)
        self._prefix = f"bench-{uuid.uuid4().hex[:12]}:"
        self._records: dict[str, list[tuple[str, bytes]]] = {}

    async def announce(self, rollouts: list[Rollout]) -> None:
        """Encode beforehand: the limit is moving the bytes, not making them."""
        for rollout in rollouts:
            records = self._records[rollout[0].rollout_id] = list(stored_by_us(rollout))
            self.stored_bytes += sum(len(record) for _, record in records)

    async def put_rollout(self, rollout: Rollout) -> None:
        key = self._prefix + rollout[0].rollout_id
        for call, record in self._records[rollout[0].rollout_id]:
            await self._client.hset(key, call, record)

    async def freeze(self, rollout_id: str, calls: int) -> None:
        names = [call for call, _ in self._records[rollout_id]]
        values = await self._client.hmget(self._prefix + rollout_id, names)
        if len(values) != calls or None in values:
            raise RuntimeError(f"{rollout_id} came back incomplete")

    async def close(self) -> None:
        await self._client.unlink(*(self._prefix + rollout_id for rollout_id in self._records))
        await self._client.aclose()


def stored_by_us(rollout: Rollout) -> Iterator[tuple[str, bytes]]:
    """Of each call the bytes that this package stores: its record and the token blocks that are new."""
    sequences: list[TokenSequence] = []
    for entry in rollout:
        encoded = codec.encode(entry, max_record_bytes=2**28, earlier=sequences)
        sequence = encoded.sequence
        stored = max((known.shared_blocks(sequence.ids) for known in sequences), default=0)
        blocks = (value for _, value in sequence.blocks_from(stored))
        yield entry.model_call_id, b"".join([encoded.record, *blocks])
        sequences = [sequence]


@dataclass
class Rates:
    """Calls per second of one contender, one value for each round."""

    put: list[float] = field(default_factory=list)
    freeze: list[float] = field(default_factory=list)
    bytes_per_call: float = 0.0


def expand(recorded: Iterable[RecordedRollout], entry_type: Any) -> list[Rollout]:
    """All attempts as entries, the way ``capture_tokens`` builds them."""
    rollouts = []
    for rollout in recorded:
        for attempt in range(ATTEMPTS):
            entries = []
            for index in range(rollout.call_count):
                call = rollout.call(index)
                sequence = call.prompt_token_ids + call.generation_token_ids
                entries.append(
                    entry_type(
                        rollout_id=f"{rollout.rollout_id}-attempt-{attempt}",
                        model_call_id=call.model_call_id,
                        prompt_token_ids=call.prompt_token_ids,
                        generation_token_ids=call.generation_token_ids,
                        generation_log_probs=call.generation_log_probs,
                        output_items=call.output_items,
                        token_item_index=call.token_item_index,
                        created_at=time.time(),
                        cum_len=len(sequence),
                        digest=compute_digest(sequence),
                    )
                )
            rollouts.append(entries)
    return rollouts


async def measure(transport: Any, rollouts: list[Rollout], rates: Rates) -> None:
    """One round of one contender."""
    calls = sum(len(rollout) for rollout in rollouts)
    try:
        await transport.announce(rollouts)
        rates.put.append(
            calls / await timed(lambda: each(transport.put_rollout(rollout) for rollout in rollouts))
        )
        rates.freeze.append(
            calls
            / await timed(
                lambda: each(transport.freeze(rollout[0].rollout_id, len(rollout)) for rollout in rollouts)
            )
        )
        rates.bytes_per_call = getattr(transport, "stored_bytes", 0) / calls
    finally:
        await transport.close()


async def each(awaitables: Iterable[Awaitable[None]]) -> None:
    """Run all of them at once."""
    await asyncio.gather(*awaitables)


async def timed(run: Callable[[], Awaitable[None]]) -> float:
    """Seconds that ``run`` takes."""
    begin = time.perf_counter()
    await run()
    return time.perf_counter() - begin


def measure_floors(rollouts: list[Rollout], floors: Rates) -> None:
    """The packing rate (as put) and the slicing rate (as freeze)."""
    entries = [entry for rollout in rollouts for entry in rollout]
    begin = time.perf_counter()
    for entry in entries:
        struct.pack(f"<{len(entry.prompt_token_ids)}I", *entry.prompt_token_ids)
        struct.pack(f"<{len(entry.generation_token_ids)}I", *entry.generation_token_ids)
    floors.put.append(len(entries) / (time.perf_counter() - begin))
    kept: list[list[int]] = []
    begin = time.perf_counter()
    for rollout in rollouts:
        whole = rollout[-1].prompt_token_ids
        kept.extend(whole[: len(entry.prompt_token_ids)] for entry in rollout)
    floors.freeze.append(len(kept) / (time.perf_counter() - begin))


def run(url: str, rounds: int, console: Console) -> dict[str, Rates]:
    """All rounds, contenders interleaved."""
    entry_type = gym_compat.gym_attribute("records", "TokenEntry") or TokenEntry
    rollouts = expand(load_rollouts(), entry_type)
    # A worker does not hold 26 million ids at once: the collector shall not walk over them in every round.
    gc.collect()
    gc.freeze()
    contenders: list[Callable[[], Any]] = [lambda: OurTransport(url), lambda: BareRedis(url)]
    if gym_compat.gym_package() is not None:
        contenders.append(GymFileStore)
    else:
        console.print("Gym's file store is left out: nemo_gym is not importable here")
    results: dict[str, Rates] = {}
    for _ in track(range(rounds), description="rounds", console=console):
        for make in contenders:
            transport = make()
            asyncio.run(measure(transport, rollouts, results.setdefault(transport.name, Rates())))
        measure_floors(rollouts, results.setdefault("floor: packing, slicing", Rates()))
    return results


def report(results: dict[str, Rates], console: Console) -> None:
    """Medians, and each as a ratio of ours to it."""
    ours = results[OurTransport.name]
    table = Table(title="calls per second, 64 rollouts in flight; medians, and ours ÷ theirs")
    for column in ("", "put/s", "ours ÷", "frozen/s", "ours ÷", "bytes/call"):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for name, rates in results.items():
        put, freeze = statistics.median(rates.put), statistics.median(rates.freeze)
        table.add_row(
            name,
            f"{put:,.0f}",
            f"{statistics.median(ours.put) / put:.2f}",
            f"{freeze:,.0f}",
            f"{statistics.median(ours.freeze) / freeze:.2f}",
            f"{rates.bytes_per_call:,.0f}" if rates.bytes_per_call else "",
        )
    console.print(table)


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


async def probe(url: str) -> None:
    """Find out at once whether the server can be used."""
    async with RedisTokenSource(url, namespace="bench-probe", timeout_s=5) as source:
        await source.drop("probe", snapshot_id="none", version=0)


def main() -> None:
    """Parse the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="server to use (default: a private one, append-only file every second)")
    parser.add_argument("--rounds", type=positive, default=5, help="repetitions, of which the medians count")
    parser.add_argument("--json", action="store_true", help="print the rates of every round as JSON")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json)
    if arguments.url:
        try:
            asyncio.run(probe(arguments.url))
        except CaptureError as error:
            parser.error(str(error))
        results = run(arguments.url, arguments.rounds, console)
    else:
        with tempfile.TemporaryDirectory() as directory, EmbeddedServer(directory) as server:
            results = run(server.url, arguments.rounds, console)
    report(results, console)
    if arguments.json:
        print(json.dumps({name: vars(rates) for name, rates in results.items()}))


if __name__ == "__main__":
    main()
