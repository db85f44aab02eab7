"""Steps that share a script call answer each for itself, on every kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from redis.exceptions import NoScriptError, ResponseError
from support.backends import EVERY_KIND, place_of
from support.sample_entries import exact_dump, sample_entry
from support.sequences import random_ids
from support.stored_state import change_state, read_state

from gym_capture_redis import batches, codec, scripts
from gym_capture_redis.connection import Link
from gym_capture_redis.errors import (
    CaptureError,
    CorruptRecordError,
    TokenCaptureFrozenError,
    UnsupportedFormatError,
)
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.records import TokenEntry
from gym_capture_redis.scripts import Call, Dialect, Reply, Step
from gym_capture_redis.settings import Durability, SinkSettings
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

pytestmark = pytest.mark.usefixtures("names_as_given")

INCARNATION = "1" * 32
OTHER_INCARNATION = "2" * 32
SNAPSHOT_ID = "3" * 32
TTL_S = 60
GOOD = 12
CALLERS = 20

Damage = Callable[[redis.Redis, str], Any]

DAMAGED: dict[str, tuple[Damage, str, type[CaptureError]]] = {
    "unreadable": (
        lambda client, key: client.hset(key, "s", "1 what is this"),
        "CORRUPT the state of the rollout is unreadable",
        CorruptRecordError,
    ),
    "stateless": (
        lambda client, key: client.hset(key, "theirs", "1"),
        "CORRUPT the rollout has no state",
        CorruptRecordError,
    ),
    "newer": (
        lambda client, key: client.hset(key, "s", "12 in another form"),
        "NEWER 12",
        UnsupportedFormatError,
    ),
    "string": (lambda client, key: client.set(key, "theirs"), "WRONGTYPE", CorruptRecordError),
    "list": (lambda client, key: client.rpush(key, "theirs"), "WRONGTYPE", CorruptRecordError),
}
"""Rollouts that no step can work on: how they became so, what a script says, what a caller gets."""


@dataclass
class Backend:
    """A server and a run on it."""

    url: str
    namespace: str
    durability: Durability
    redis: redis.Redis

    def key(self, rollout: str) -> bytes:
        return rollout_key(self.namespace, rollout)

    def settings(self, **others: Any) -> dict[str, Any]:
        return {"namespace": self.namespace, "durability": self.durability, **others}

    def damage(self) -> dict[str, Any]:
        """Make all the damaged rollouts, and return what they hold."""
        for name, (damage, _, _) in DAMAGED.items():
            damage(self.redis, self.key(name).decode())
        return self.damaged()

    def damaged(self) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for name in DAMAGED:
            key = self.key(name).decode()
            read = {"string": self.redis.get, "list": lambda key: self.redis.lrange(key, 0, -1)}
            held[name] = read.get(name, self.redis.hgetall)(key)
        return held


@pytest.fixture(params=EVERY_KIND)
def backend(request: pytest.FixtureRequest, namespace: str) -> Iterator[Backend]:
    with place_of(request, namespace) as place:
        yield Backend(place.url, namespace, place.durability, place.redis)


# One script call, as it is


@pytest.fixture
async def link(backend: Backend) -> AsyncIterator[Link]:
    settings = SinkSettings.build(backend.url, backend.namespace, {"durability": backend.durability})
    made = Link(settings, settings.url.path)
    await made.connect()
    yield made
    await made.close()


async def run_together(link: Link, calls: list[Call]) -> list[Reply | ResponseError]:
    """All of them in one script call, whose only reply must be theirs."""
    command = scripts.command(calls, link.dialect, by_source=True)
    (answer,), _ = await link.pipeline([command])
    return scripts.read_replies(answer, len(calls), link.run_id)


def entry_of(rollout: str, call: str = "c") -> TokenEntry:
    """One of two token blocks and a tail; without experts, so that it is encoded in the event loop."""
    return sample_entry(rollout, call, prompt_token_ids=random_ids(600), routed_experts=None)


def put_of(key: bytes, rollout: str, call: str = "c", incarnation: str = INCARNATION) -> Call:
    encoded = codec.encode(entry_of(rollout, call), max_record_bytes=2**20)
    return scripts.put(key, encoded, incarnation=incarnation, first_block=0)


STEPS: dict[Step, Callable[[bytes, str], Call]] = {
    Step.JOIN: lambda key, _: scripts.join(key, new_incarnation=OTHER_INCARNATION),
    Step.BEGIN: lambda key, _: scripts.begin(key, "d", new_incarnation=OTHER_INCARNATION),
    Step.PUT: put_of,
    Step.STAGE: lambda key, _: scripts.stage(key, b"n" * 16, b"a part", incarnation=INCARNATION),
    Step.MARK: lambda key, _: scripts.mark(
        key, "c", new_incarnation=OTHER_INCARNATION, incarnation=INCARNATION, mark_id="0" * 16
    ),
    Step.REFUSE: lambda key, rollout: scripts.refuse(
        key,
        "c",
        new_incarnation=OTHER_INCARNATION,
        incarnation=INCARNATION,
        code="full",
        details=codec.encode_refusal(rollout, "c", "full", {}),
    ),
    Step.FREEZE: lambda key, _: scripts.freeze(
        key, new_incarnation=OTHER_INCARNATION, new_snapshot_id=SNAPSHOT_ID, max_bytes=1
    ),
    Step.PEEK: lambda key, _: scripts.peek(key),
    Step.RETIRE: lambda key, _: scripts.retire(
        key, incarnation=INCARNATION, new_incarnation=OTHER_INCARNATION, tombstone_ttl_s=TTL_S
    ),
    Step.DELETE: lambda key, _: scripts.delete(key, incarnation=INCARNATION),
    Step.READ: lambda key, _: scripts.read(
        key, incarnation=INCARNATION, snapshot_id=SNAPSHOT_ID, version=1, from_seq=1, max_bytes=1
    ),
    Step.DROP: lambda key, _: scripts.drop(
        key, snapshot_id=SNAPSHOT_ID.encode(), version=1, tombstone_ttl_s=TTL_S
    ),
    Step.VERIFY: lambda key, _: scripts.verify(
        key, new_incarnation=OTHER_INCARNATION, incarnation=INCARNATION, seq=9
    ),
    Step.INDEX: lambda key, _: scripts.index(key, incarnation=INCARNATION, from_seq=1, max_bytes=1),
    Step.BLOCKS: lambda key, _: scripts.blocks(key, incarnation=INCARNATION, known=[], ends=[]),
    Step.RECORD: lambda key, _: scripts.record(key, "d", b"a row", incarnation=INCARNATION),
    Step.FAIL: lambda key, _: scripts.fail(
        key, "d", b"a reason", new_incarnation=OTHER_INCARNATION, incarnation=INCARNATION
    ),
    Step.ROWS: lambda key, _: scripts.rows(key, incarnation=INCARNATION, from_seq=1, max_bytes=1),
    Step.FIELDS: lambda key, _: scripts.fields(
        key, [b"c:c"], incarnation=INCARNATION, max_bytes=1, reply_bytes=1
    ),
}


@pytest.mark.parametrize("step", [step for step in Step if step.is_script])
async def test_a_damaged_rollout_among_good_ones_answers_for_itself_alone(
    backend: Backend, link: Link, step: Step
) -> None:
    good = [f"good{number}" for number in range(GOOD)]
    await run_together(
        link, [scripts.begin(backend.key(rollout), "c", new_incarnation=INCARNATION) for rollout in good]
    )
    if step in (Step.READ, Step.DROP):
        await run_together(link, [STEPS[Step.FREEZE](backend.key(rollout), rollout) for rollout in good])
    before, untouched = backend.damage(), read_state(backend.redis, backend.key("good0"))
    names = [*DAMAGED, *good]
    order = [names[number * 5 % len(names)] for number in range(len(names))]  # 5 and 17 share no factor
    replies = await run_together(link, [STEPS[step](backend.key(rollout), rollout) for rollout in order])
    for rollout, reply in zip(order, replies, strict=True):
        if rollout in DAMAGED:
            assert isinstance(reply, ResponseError)
            assert str(reply).startswith(DAMAGED[rollout][1])
        else:
            assert isinstance(reply, Reply)
            assert (reply.code, reply.incarnation) == ("OK", "" if step is Step.DELETE else INCARNATION)
    assert backend.damaged() == before
    left = [backend.redis.hget(backend.key(rollout).decode(), "s") for rollout in good]
    assert len(set(left)) == 1
    assert (left[0] is None) == (step is Step.DELETE)
    if step not in (
        Step.JOIN,
        Step.PEEK,
        Step.READ,
        Step.INDEX,
        Step.BLOCKS,
        Step.ROWS,
        Step.FIELDS,
        Step.DELETE,
    ):
        assert read_state(backend.redis, backend.key("good0")) != untouched


async def test_a_state_that_counts_too_few_bytes_does_not_make_a_reply_of_all_there_is(
    backend: Backend, link: Link
) -> None:
    key, names = backend.key("r"), [f"c{number:03}" for number in range(100)]
    await run_together(link, [scripts.join(key, new_incarnation=INCARNATION)])
    for name in names:
        entry = sample_entry("r", name, response_id="x" * 10_000, routed_experts=None)
        encoded = codec.encode(entry, max_record_bytes=2**20)
        await run_together(link, [scripts.put(key, encoded, incarnation=INCARNATION, first_block=0)])
    change_state(backend.redis, key, bytes=b"0")
    call = scripts.freeze(
        key, new_incarnation=OTHER_INCARNATION, new_snapshot_id=SNAPSHOT_ID, max_bytes=50_000
    )
    (reply,) = await run_together(link, [call])
    assert isinstance(reply, Reply)
    found = scripts.Frozen.parse(reply).chunk
    assert sum(len(row.value or b"") for row in found.rows) <= 200_000
    while found.next_seq <= reply.seq:
        call = scripts.read(
            key,
            incarnation=reply.incarnation,
            snapshot_id=scripts.Frozen.parse(reply).snapshot_id,
            version=reply.version,
            from_seq=found.next_seq,
            max_bytes=50_000,
        )
        (more,) = await run_together(link, [call])
        assert isinstance(more, Reply)
        rows = scripts.Chunk.parse(*more.rest)
        assert sum(len(row.value or b"") for row in rows.rows) <= 200_000
        found = scripts.Chunk(rows.next_seq, found.rows + rows.rows)
    assert [row.field for row in found.rows] == [f"r:{name}".encode() for name in names]


async def test_entries_of_one_rollout_follow_each_other_in_their_order(backend: Backend, link: Link) -> None:
    key = backend.key("r")
    replies = await run_together(
        link,
        [
            scripts.begin(backend.key("r"), call, new_incarnation=INCARNATION)
            for call in ("a", "b", "a", "c", "b")
        ],
    )
    assert [(reply.code, reply.seq) for reply in replies if isinstance(reply, Reply)] == [
        *(("OK", 1), ("OK", 2), ("SAME", 2), ("OK", 3), ("SAME", 3))
    ]
    replies = await run_together(link, [put_of(key, "r", call) for call in ("c", "a", "c", "b")])
    assert [(reply.code, reply.seq, reply.version) for reply in replies if isinstance(reply, Reply)] == [
        *(("OK", 4, 1), ("OK", 5, 2), ("SAME", 5, 2), ("OK", 6, 3))
    ]
    traces = [backend.redis.hget(key.decode(), f"o:{seq}") for seq in (4, 5, 6)]
    names = codec.encode(entry_of("r"), max_record_bytes=2**20).sequence.names
    assert traces == [b"2:" + b"".join(names) + b"r:c", b"0:r:a", b"0:r:b"]


async def test_entries_of_one_call_have_outcomes_of_their_own(backend: Backend, link: Link) -> None:
    """Every outcome of a put in one script call."""
    rollouts = ("ok", "same", "conflict", "frozen", "retired", "other")
    keys = {name: backend.key(name) for name in (*rollouts, "missing", "absent")}
    await run_together(link, [scripts.join(keys[name], new_incarnation=INCARNATION) for name in rollouts])
    await run_together(link, [scripts.join(keys["missing"], new_incarnation=INCARNATION)])
    await run_together(link, [put_of(keys["same"], "same")])
    other = codec.encode(sample_entry("conflict", "c"), max_record_bytes=2**20)
    await run_together(link, [scripts.put(keys["conflict"], other, incarnation=INCARNATION, first_block=0)])
    await run_together(link, [STEPS[Step.FREEZE](keys["frozen"], "frozen")])
    await run_together(link, [STEPS[Step.RETIRE](keys["retired"], "retired")])
    encoded = codec.encode(entry_of("missing"), max_record_bytes=2**20)
    calls = [put_of(keys[name], name) for name in rollouts[:-1]]
    calls.append(put_of(keys["other"], "other", incarnation=OTHER_INCARNATION))
    calls.append(scripts.put(keys["missing"], encoded, incarnation=INCARNATION, first_block=1))
    calls.append(put_of(keys["absent"], "absent"))
    replies = await run_together(link, calls)
    assert [reply.code for reply in replies if isinstance(reply, Reply)] == [
        *("OK", "SAME", "CONFLICT", "FROZEN", "RETIRED", "RETIRED", "MISSING", "RETIRED")
    ]
    assert not backend.redis.exists(keys["absent"])


@pytest.mark.parametrize("count", [1, 2, batches.MAX_BATCH_CALLS, 500])
async def test_any_number_of_steps_may_share_a_script_call(backend: Backend, link: Link, count: int) -> None:
    """With arguments of every length, so that none is taken for a part of another."""
    calls = [
        scripts.begin(backend.key(f"r{number}"), "c" * (1 + number * 7 % 90), new_incarnation=f"{number:032}")
        for number in range(count)
    ]
    replies = await run_together(link, calls)
    assert [reply.incarnation for reply in replies if isinstance(reply, Reply)] == [
        f"{number:032}" for number in range(count)
    ]
    for number in range(count):
        fields: Any = backend.redis.hgetall(backend.key(f"r{number}").decode())
        call = b"c" * (1 + number * 7 % 90)
        assert (fields[b"c:" + call], fields[b"o:1"], len(fields)) == (b"n", b"0:n:" + call, 3)


async def test_a_script_the_server_does_not_know_changes_nothing_for_any_of_its_entries(
    backend: Backend, link: Link
) -> None:
    backend.redis.script_flush()
    calls = [scripts.begin(backend.key(f"r{n}"), "c", new_incarnation=INCARNATION) for n in range(GOOD)]
    (answer,), _ = await link.pipeline([scripts.command(calls, link.dialect, by_source=False)])
    assert isinstance(answer, NoScriptError)
    assert not backend.redis.exists(*(call.key for call in calls))


# The same through a sink and a source


class ScriptCalls:
    """Keeps the script calls that are sent: step, by source or not, and how many entries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[Step, bool, int]] = []
        monkeypatch.setattr(batches, "commands", self._command)

    def _command(self, calls: list[Call], dialect: Dialect, *, by_source: bool) -> Any:
        self.sent.append((calls[0].step, by_source, len(calls)))
        return scripts.commands(calls, dialect, by_source=by_source)

    def of(self, step: Step) -> list[tuple[bool, int]]:
        return [(by_source, count) for sent, by_source, count in self.sent if sent is step]


@dataclass
class Clients:
    sink: RedisTokenSink
    source: RedisTokenSource
    script_calls: ScriptCalls


@pytest.fixture
async def clients(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    """With one connection, so that all that is asked at once is in one batch."""
    async with (
        RedisTokenSink(backend.url, **backend.settings(connections=1)) as sink,
        RedisTokenSource(backend.url, **backend.settings(connections=1)) as source,
    ):
        yield Clients(sink, source, ScriptCalls(monkeypatch))


def together(count: int, *, by_source: bool = False) -> list[list[tuple[bool, int]]]:
    """How so many steps may be sent: all in one, or the first before the others, as nothing was under way."""
    return [[(by_source, count)], [(by_source, 1), (by_source, count - 1)]]


async def warm_up(clients: Clients) -> None:
    """Let the server know the scripts, and the lanes their connection."""
    await clients.sink.begin_call("warm", "c")
    await clients.sink.mark_incomplete("warm")
    await clients.sink.put(entry_of("warm"))
    clients.script_calls.sent.clear()


async def test_puts_among_those_to_damaged_rollouts_are_stored(backend: Backend, clients: Clients) -> None:
    good = [f"good{number}" for number in range(GOOD)]
    await warm_up(clients)
    await asyncio.gather(*(clients.sink.begin_call(rollout, "c") for rollout in (*good, *DAMAGED)))
    for name in DAMAGED:
        backend.redis.delete(backend.key(name))
    before = backend.damage()
    outcomes = await asyncio.gather(
        *(clients.sink.put(entry_of(rollout)) for rollout in (*good[:5], *DAMAGED, *good[5:])),
        return_exceptions=True,
    )
    assert clients.script_calls.of(Step.PUT) in together(GOOD + len(DAMAGED))
    refused = dict(zip(DAMAGED, outcomes[5 : 5 + len(DAMAGED)], strict=True))
    for name, (_, _, error_class) in DAMAGED.items():
        error = refused[name]
        assert isinstance(error, error_class)
        assert (error.rollout_id, error.model_call_id) == (name, "c")
        assert f"rollout {name}" in str(error)
    assert [outcome for outcome in outcomes if outcome not in refused.values()] == [None] * GOOD
    assert backend.damaged() == before
    for rollout in good:
        snapshot = await clients.source.freeze(rollout)
        assert not snapshot.incomplete, snapshot.reasons
        assert [exact_dump(entry) for entry in snapshot.entries] == [exact_dump(entry_of(rollout))]


async def test_marks_and_announcements_among_those_to_damaged_rollouts_are_made(
    backend: Backend, clients: Clients
) -> None:
    await warm_up(clients)
    backend.damage()
    names = ("good0", *DAMAGED, "good1")
    for act in (clients.sink.begin_call, clients.sink.mark_incomplete):
        outcomes = await asyncio.gather(*(act(name, "c") for name in names), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [
            type(None),
            *(error_class for _, _, error_class in DAMAGED.values()),
            type(None),
        ]
    for step in (Step.BEGIN, Step.MARK):
        assert clients.script_calls.of(step) in together(len(names))
    for rollout in ("good0", "good1"):
        assert [reason.code for reason in (await clients.source.freeze(rollout)).reasons] == ["marked"]


REORDERED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"x": 1, "y": 2}, {"y": 2, "x": 1}),
    (
        {"output_items": [{"a": 1, "b": {"c": 2, "d": 3}}]},
        {"output_items": [{"b": {"d": 3, "c": 2}, "a": 1}]},
    ),
    ({"routed_experts": {"a": 1, "b": 2}}, {"routed_experts": {"b": 2, "a": 1}}),
]


@pytest.mark.parametrize(("one", "other"), REORDERED, ids=["extras", "output items", "experts"])
async def test_the_same_content_in_another_order_of_its_keys_is_the_same_put(
    clients: Clients, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """As another version of the engine, or a copy of the entry that went through JSON, may have it."""
    for fields in (one, other, one):
        await clients.sink.put(sample_entry("r", "c", token_item_index=None, **fields))
    snapshot = await clients.source.freeze("r")
    assert not snapshot.incomplete, snapshot.reasons
    assert snapshot.version == 2
    for fields in (one, other):
        await clients.sink.put(sample_entry("r", "c", token_item_index=None, **fields))


async def test_a_frozen_rollout_refuses_its_own_put_only(clients: Clients) -> None:
    await warm_up(clients)
    await asyncio.gather(*(clients.sink.begin_call(f"r{number}", "c") for number in range(GOOD)))
    await clients.source.freeze("r3")
    outcomes = await asyncio.gather(
        *(clients.sink.put(entry_of(f"r{number}")) for number in range(GOOD)), return_exceptions=True
    )
    assert [number for number, outcome in enumerate(outcomes) if outcome is not None] == [3]
    assert isinstance(outcomes[3], TokenCaptureFrozenError)


async def test_a_script_flushed_under_a_group_is_sent_by_source_for_all_of_them(
    backend: Backend, clients: Clients
) -> None:
    await warm_up(clients)
    await asyncio.gather(*(clients.sink.begin_call("r", f"c{number}") for number in range(CALLERS)))
    backend.redis.script_flush()
    clients.script_calls.sent.clear()
    await asyncio.gather(*(clients.sink.put(entry_of("r", f"c{number}")) for number in range(CALLERS)))
    sent = clients.script_calls.of(Step.PUT)
    for by_source in (False, True):
        assert [each for each in sent if each[0] is by_source] in together(CALLERS, by_source=by_source)
    snapshot = await clients.source.freeze("r")
    assert not snapshot.incomplete, snapshot.reasons
    assert {entry.model_call_id: exact_dump(entry) for entry in snapshot.entries} == {
        f"c{number}": exact_dump(entry_of("r", f"c{number}")) for number in range(CALLERS)
    }
    state = read_state(backend.redis, backend.key("r"))
    assert (state["records"], state["intents"], state["blocks"]) == (b"%d" % CALLERS, b"0", b"2")
