"""Damage behind the transport's back is noticed: refused in clear words, or incomplete with a reason.

Edits of several fields that agree with each other cannot be noticed and are not tried.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import stored_state
from support.damage import Edit, edits_of
from support.sample_entries import exact_dump, sample_entry
from support.sequences import random_ids
from support.servers import RealServer
from support.stored_state import change_state, read_state

from gym_capture_redis import codec
from gym_capture_redis.errors import (
    BackendUnavailableError,
    CaptureError,
    CorruptRecordError,
    TokenCaptureFrozenError,
    UnsupportedFormatError,
)
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

ROLLOUT = "rollout"
PROMPT = random_ids(700)
"""The first call begins with one token block, the second with two; they share the first of them."""

TIMEOUT_S = 20.0
REFUSAL: dict[str, Any] = {"code": "overloaded", "retry_after": 3, "why": "queue is full"}


class Rollout:
    """A rollout on a real server that can be damaged and restored."""

    def __init__(self, server: RealServer, namespace: str) -> None:
        self.url = server.url
        self.settings: dict[str, Any] = {"namespace": namespace, "timeout_s": TIMEOUT_S}
        self.redis = server.client()
        self.key = rollout_key(namespace, ROLLOUT)
        self.sink = RedisTokenSink(self.url, **self.settings)
        self.source = RedisTokenSource(self.url, **self.settings)
        self.puts = {
            call: sample_entry(ROLLOUT, call, parent_call_id=parent, prompt_token_ids=PROMPT[:length])
            for call, parent, length in (("a", None, 300), ("b", "a", 700))
        }
        self._dump: Any = None

    def reader(self, **settings: Any) -> RedisTokenSource:
        return RedisTokenSource(self.url, **self.settings | settings)

    async def fill(self, kind: str) -> None:
        """Write two records and a refusal; ``lost``: with an open intent, ``marked``: with a failure."""
        await self.sink.begin_call(ROLLOUT, "a")
        for entry in self.puts.values():
            await self.sink.put(entry)
        await self.sink.record_engine_refusal(ROLLOUT, model_call_id="c", **REFUSAL)
        if kind == "lost":
            await self.sink.begin_call(ROLLOUT, "d")
        if kind == "marked":
            await self.sink.mark_incomplete(ROLLOUT, "d")

    def save(self) -> dict[bytes, bytes]:
        self._dump = self.redis.dump(self.key)
        fields: Any = self.redis.hgetall(self.key)
        return dict(fields)

    def restore(self) -> None:
        self.redis.restore(self.key, 0, self._dump, replace=True)

    async def problem_of(self, edit: Edit, *, complete: bool) -> str | None:
        """Damage the rollout, freeze it, and say what is wrong with the outcome."""
        self.restore()
        edit.apply(self.redis, self.key)
        try:
            snapshot = await self.source.freeze(ROLLOUT)
        except BackendUnavailableError as error:
            return f"looks like a server that is away: {error}"
        except CaptureError as error:
            return None if ROLLOUT in str(error) else f"an error that does not name the rollout: {error}"
        except Exception as error:  # noqa: BLE001 - what this test is about
            return f"raises {error!r}"
        return self.false_content(snapshot, complete=complete) or await self.broken_fence(snapshot)

    def false_content(self, snapshot: TokenCaptureSnapshot, *, complete: bool) -> str | None:
        for entry in snapshot.entries:
            if exact_dump(entry) != exact_dump(self.puts[entry.model_call_id]):
                return "gives another entry"
        if snapshot.incomplete:
            return None if all(reason.detail for reason in snapshot.reasons) else "no reason is given"
        if not complete:
            return "hides that a call was lost"
        original = self.is_the_original(snapshot)
        return None if original else f"looks complete with other content: {snapshot.refusals}"

    def is_the_original(self, snapshot: TokenCaptureSnapshot) -> bool:
        (refusal,) = snapshot.refusals or (None,)
        return (
            {entry.model_call_id for entry in snapshot.entries} == set(self.puts)
            and refusal is not None
            and (refusal.model_call_id, {"code": refusal.code, **refusal.details}) == ("c", REFUSAL)
        )

    async def broken_fence(self, snapshot: TokenCaptureSnapshot) -> str | None:
        """Damage that changed no content is harmless only if the frozen rollout goes on as one."""
        if snapshot.incomplete:
            return None
        try:
            await self.sink.put(sample_entry(ROLLOUT, "late"))
        except TokenCaptureFrozenError:
            pass
        except CaptureError as error:
            return f"looks complete, and a late put gets {error!r}"
        else:
            return "takes a put after its freeze"
        again = await self.source.freeze(ROLLOUT)
        if (again.snapshot_id, again.version) != (snapshot.snapshot_id, snapshot.version):
            return "has another snapshot at every freeze"
        if not await self.source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version):
            return "cannot be dropped"
        return None


@pytest.fixture
async def rollout(real_server: RealServer, namespace: str) -> AsyncIterator[Rollout]:
    prepared = Rollout(real_server, namespace)
    yield prepared
    await prepared.sink.close()
    await prepared.source.close()
    prepared.redis.close()


@pytest.mark.parametrize("frozen", [False, True], ids=["while open", "after freeze"])
@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        *(("whole", prefix) for prefix in ("s", "o:", "c:", "r:", "b:")),
        *(("lost", prefix) for prefix in ("s", "o:", "c:", "r:", "b:")),
        *(("marked", prefix) for prefix in ("s", "o:", "c:", "r:", "f:")),
    ],
)
async def test_damage_to_one_field_is_noticed_or_changes_nothing(
    rollout: Rollout, kind: str, prefix: str, *, frozen: bool
) -> None:
    await rollout.fill(kind)
    if frozen:
        await rollout.source.freeze(ROLLOUT)
    fields = rollout.save()
    edits = [
        edit
        for field, value in sorted(fields.items())
        if field.startswith(prefix.encode())
        for edit in edits_of(field, value)
    ]
    assert edits
    outcomes = {edit: await rollout.problem_of(edit, complete=kind == "whole") for edit in edits}
    problems = [f"{edit} → {problem}" for edit, problem in outcomes.items() if problem]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("frozen", [False, True], ids=["while open", "after freeze"])
@pytest.mark.parametrize(
    "field",
    [
        *("s2", "s:new", "o:99", "o:0", "c:z", "c:", "r:z", "f:z", "b:z", "b:" + 16 * "z", "b:"),
        *("z", "", "r:c", "f:a", "n:z", "x:z", "n:a", "x:a", "i:a"),
    ],
)
async def test_a_stray_field_makes_the_rollout_incomplete(
    rollout: Rollout, field: str, *, frozen: bool
) -> None:
    await rollout.fill("whole")
    if frozen:
        await rollout.source.freeze(ROLLOUT)
    rollout.redis.hset(rollout.key, field, "stray")
    snapshot = await rollout.source.freeze(ROLLOUT)
    assert snapshot.incomplete
    assert snapshot.reasons


@pytest.mark.parametrize("field", ["c:e", "n:d", "o:99"])
async def test_a_field_added_and_one_taken_away_do_not_make_up_for_each_other(
    rollout: Rollout, field: str
) -> None:
    await rollout.fill("lost")
    rollout.redis.hdel(rollout.key, "c:d")
    rollout.redis.hset(rollout.key, field, "n")
    assert (await rollout.source.freeze(ROLLOUT)).incomplete


# What is written after the damage

LATER = ("e", "g")


def later_entry(call: str) -> Any:
    """One that brings a block of its own, after two that are there already, or one without any block."""
    return sample_entry(ROLLOUT, call, prompt_token_ids=PROMPT + random_ids(300, 1) if call == "e" else [1])


def edits_before_more_steps(rollout: Rollout, fields: dict[bytes, bytes]) -> list[Edit]:
    """Edits of what is there, with every seventh bit, and fields that the steps to come would write."""
    edits = [edit for field, value in sorted(fields.items()) for edit in edits_of(field, value)]
    kept = [edit for edit in edits if not (edit.what.startswith("bit") and int(edit.what.split()[1]) % 7)]
    seq = int(read_state(rollout.redis, rollout.key)["seq"])
    new_block = codec.encode(later_entry("e"), max_record_bytes=2**20).sequence.blocks_from(2)[0]
    stray = {
        **{b"o:%d" % (seq + ahead): b"0:n:d" for ahead in (1, 2, 3, 4)},
        **{b"%b:%b" % (kind, call.encode()): b"stray" for kind in (b"r", b"c", b"f") for call in LATER},
        b"c:e": b"n",
        b"c:g": b"r" + 32 * b"d",
        b"b:" + new_block[0]: b"stray",
    }
    return [
        *kept,
        *(Edit("was not there", field, value) for field, value in stray.items()),
        Edit("was there before its step", b"b:" + new_block[0], new_block[1]),
    ]


async def test_what_is_written_after_the_damage_hides_none_of_it(rollout: Rollout) -> None:
    await rollout.fill("whole")
    originals = dict(rollout.puts)
    problems = []
    async with RedisTokenSink(rollout.url, **rollout.settings, prefix_cache_bytes=0) as sink:
        for edit in edits_before_more_steps(rollout, rollout.save()):
            rollout.restore()
            edit.apply(rollout.redis, rollout.key)
            rollout.puts = dict(originals)
            for call in LATER:
                try:
                    if call == "e":
                        await sink.begin_call(ROLLOUT, call)
                    await sink.put(later_entry(call))
                except BackendUnavailableError as error:
                    problems.append(f"{edit} → looks like a server that is away: {error}")
                except CaptureError:
                    continue
                rollout.puts[call] = later_entry(call)
            try:
                snapshot = await rollout.source.freeze(ROLLOUT)
            except CaptureError as error:
                if ROLLOUT not in str(error) or isinstance(error, BackendUnavailableError):
                    problems.append(f"{edit} → {error!r}")
                continue
            problem = rollout.false_content(snapshot, complete=True)
            if problem:
                problems.append(f"{edit} → {problem}")
    assert not problems, "\n".join(problems)


async def test_two_blocks_exchanged_are_noticed(rollout: Rollout) -> None:
    await rollout.fill("whole")
    fields = rollout.save()
    one, other = (field for field in fields if field.startswith(b"b:"))
    rollout.redis.hset(rollout.key, mapping={one: fields[other], other: fields[one]})
    snapshot = await rollout.source.freeze(ROLLOUT)
    assert snapshot.entries == ()
    assert {reason.model_call_id for reason in snapshot.reasons if reason.code == "corrupt"} == {"a", "b"}


@pytest.mark.parametrize("count", [2, 1_000, 10**9, 10**15, 10**30])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 2**20])
async def test_a_step_that_claims_any_number_of_blocks_is_noticed_at_once(
    rollout: Rollout, count: int, chunk_bytes: int
) -> None:
    await rollout.fill("whole")
    steps = {field: value for field, value in rollout.save().items() if field.startswith(b"o:")}
    for field, value in steps.items():
        rollout.restore()
        rollout.redis.hset(rollout.key, field, b"%d:" % count + value.partition(b":")[2])
        hasty = rollout.reader(chunk_bytes=chunk_bytes, timeout_s=5)
        async with hasty:
            snapshot = await hasty.freeze(ROLLOUT)
        assert "tampered" in {reason.code for reason in snapshot.reasons}
        assert rollout.false_content(snapshot, complete=True) is None


async def test_two_records_exchanged_with_their_digests_are_noticed(rollout: Rollout) -> None:
    await rollout.fill("whole")
    fields = rollout.save()
    for prefix in (b"r:", b"c:"):
        swapped: Any = {prefix + b"a": fields[prefix + b"b"], prefix + b"b": fields[prefix + b"a"]}
        rollout.redis.hset(rollout.key, mapping=swapped)
    snapshot = await rollout.source.freeze(ROLLOUT)
    assert snapshot.entries == ()
    assert {reason.model_call_id for reason in snapshot.reasons} == {"a", "b"}


def calls_on(rollout: Rollout) -> dict[str, Any]:
    sink, source = rollout.sink, rollout.source
    return {
        "put": lambda: sink.put(sample_entry(ROLLOUT, "new")),
        "begin_call": lambda: sink.begin_call(ROLLOUT, "new"),
        "mark_incomplete": lambda: sink.mark_incomplete(ROLLOUT, "new"),
        "record_engine_refusal": lambda: sink.record_engine_refusal(ROLLOUT, model_call_id="new", code="x"),
        "freeze": lambda: source.freeze(ROLLOUT),
        "drop": lambda: source.drop(ROLLOUT, snapshot_id="x", version=1),
        "retire": lambda: source.retire([ROLLOUT]),
        "delete": lambda: source.delete([ROLLOUT]),
    }


CALLS = (
    *("put", "begin_call", "mark_incomplete", "record_engine_refusal"),
    *("freeze", "drop", "retire", "delete"),
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["string", "list"])
async def test_a_key_of_another_type_is_refused_by_every_call_and_left_alone(
    rollout: Rollout, kind: str, call: str
) -> None:
    client, key = rollout.redis, rollout.key.decode()
    if kind == "string":
        client.set(key, "theirs")
    else:
        client.rpush(key, "theirs")
    before = client.dump(key)
    with pytest.raises(CorruptRecordError, match=r"no hash.*another namespace.*rollout rollout") as refusal:
        await calls_on(rollout)[call]()
    assert refusal.value.rollout_id == ROLLOUT
    assert client.dump(key) == before


@pytest.mark.parametrize("call", CALLS)
async def test_another_programs_hash_is_refused_by_every_call_and_left_alone(
    rollout: Rollout, call: str
) -> None:
    rollout.redis.hset(rollout.key, "theirs", "1")
    with pytest.raises(CorruptRecordError, match=r"damaged rollout.*has no state.*rollout rollout"):
        await calls_on(rollout)[call]()
    assert rollout.redis.hgetall(rollout.key) == {b"theirs": b"1"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("newer", [b"2", b"10"])
async def test_a_newer_format_asks_every_call_to_upgrade_and_is_left_alone(
    rollout: Rollout, newer: bytes, call: str
) -> None:
    await rollout.fill("whole")
    change_state(rollout.redis, rollout.key, format=newer)
    before = rollout.save()
    with pytest.raises(
        UnsupportedFormatError, match=r"newer than this version reads; upgrade.*rollout rollout"
    ):
        await calls_on(rollout)[call]()
    assert rollout.save() == before


@pytest.mark.parametrize("call", CALLS)
async def test_damaged_state_never_breaks_a_call_in_another_way(rollout: Rollout, call: str) -> None:
    await rollout.fill("whole")
    fields = rollout.save()
    run, untyped = calls_on(rollout)[call], []
    for field, value in sorted(fields.items()):
        for edit in edits_of(field, value) if field == stored_state.FIELD else ():
            rollout.restore()
            edit.apply(rollout.redis, rollout.key)
            try:
                await run()
            except BackendUnavailableError as error:
                untyped.append(f"{edit} → {error}")
            except CaptureError:
                continue
            except Exception as error:  # noqa: BLE001 - what this test is about
                untyped.append(f"{edit} → {error!r}")
    assert not untyped, "\n".join(untyped)


async def test_a_rollout_that_vanished_refuses_the_call_that_was_announced(rollout: Rollout) -> None:
    await rollout.fill("lost")
    rollout.redis.delete(rollout.key)
    with pytest.raises(CaptureError, match="retired, deleted or has expired"):
        await rollout.sink.put(sample_entry(ROLLOUT, "d"))
