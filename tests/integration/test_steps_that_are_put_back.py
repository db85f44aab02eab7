"""The scripts that put steps back: each in its place, and never in another's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from support.sample_entries import sample_entry
from support.sequences import random_ids
from support.stored_state import FIELD, change_state, hash_fields, parse_state

from gym_capture_redis import codec, scripts
from gym_capture_redis.connection import Link
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import IncompleteCode, TokenCaptureSnapshot
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.settings import Durability, SinkSettings
from gym_capture_redis.source import RedisTokenSource

pytestmark = pytest.mark.usefixtures("names_as_given")

ATTEMPT, LATER_ATTEMPT, NEW = "1" * 32, "2" * 32, "3" * 32
SNAPSHOT_ID = "5" * 32
MARK_ID = "7" * 16
PART = b"n" * 16


@dataclass
class Rollout:
    """One rollout, worked on by script calls one at a time."""

    link: Link
    redis: redis.Redis
    url: str
    durability: Durability
    namespace: str

    @property
    def key(self) -> bytes:
        return rollout_key(self.namespace, "r")

    async def run(self, call: Call) -> Reply:
        (answer,), _ = await self.link.pipeline([scripts.command([call], self.link.dialect, by_source=True)])
        (reply,) = scripts.read_replies(answer, 1, "")
        assert isinstance(reply, Reply)
        return reply

    async def heal(self, call: Call, seq: int, incarnation: str = ATTEMPT) -> str:
        return (
            await self.run(scripts.heal(call, seq=seq, incarnation=incarnation, new_incarnation=NEW))
        ).code

    async def freeze(self) -> Reply:
        return await self.run(
            scripts.freeze(self.key, new_incarnation=NEW, new_snapshot_id=SNAPSHOT_ID, max_bytes=1)
        )

    @property
    def fields(self) -> dict[bytes, bytes]:
        held: Any = self.redis.hgetall(self.key.decode())
        return dict(held)

    @property
    def state(self) -> dict[str, bytes]:
        return parse_state(self.fields[FIELD])

    @property
    def is_whole(self) -> bool:
        return len(self.fields) == hash_fields(self.state)

    async def snapshot(self) -> TokenCaptureSnapshot:
        settings: dict[str, Any] = {"namespace": self.namespace, "durability": self.durability}
        async with RedisTokenSource(self.url, **settings) as source:
            return await source.freeze("r")

    def begin(self, call: str, incarnation: str = ATTEMPT) -> Call:
        return scripts.begin(self.key, call, new_incarnation=incarnation)

    def put(self, call: str, first_block: int = 0, **fields: Any) -> Call:
        entry = sample_entry("r", call, **fields)
        encoded = codec.encode(entry, max_record_bytes=2**20)
        return scripts.put(self.key, encoded, incarnation=ATTEMPT, first_block=first_block)

    def stage(self, name: bytes = PART) -> Call:
        return scripts.stage(self.key, name, b"a part", incarnation=ATTEMPT)

    def mark(self, call: str, incarnation: str = ATTEMPT) -> Call:
        return scripts.mark(self.key, call, new_incarnation=NEW, incarnation=incarnation, mark_id=MARK_ID)

    def refuse(self, call: str, code: str = "full") -> Call:
        return scripts.refuse(
            self.key,
            call,
            new_incarnation=NEW,
            incarnation=ATTEMPT,
            code=code,
            details=codec.encode_refusal("r", call, code, {}),
        )

    def verify(self, seq: int, incarnation: str = ATTEMPT, own: tuple[int, bytes] = (0, b"")) -> Call:
        return scripts.verify(
            self.key,
            new_incarnation=NEW,
            incarnation=incarnation,
            seq=seq,
            own_seq=own[0],
            own_trace=own[1],
        )


@pytest.fixture
async def rollout(place: Any, namespace: str) -> AsyncIterator[Rollout]:
    """Begun with one call, in step 1."""
    settings = SinkSettings.build(place.url, namespace, {"durability": place.durability})
    link = Link(settings, settings.url.path)
    await link.connect()
    made = Rollout(link, place.redis, place.url, place.durability, namespace)
    assert (await made.run(made.begin("begun"))).code == "OK"
    yield made
    await link.close()


KINDS: dict[Step, Callable[[Rollout], Call]] = {
    Step.BEGIN: lambda rollout: rollout.begin("call"),
    Step.PUT: lambda rollout: rollout.put("call"),
    Step.STAGE: lambda rollout: rollout.stage(),
    Step.REFUSE: lambda rollout: rollout.refuse("call"),
    Step.MARK: lambda rollout: rollout.mark("call"),
}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@every_kind
async def test_a_step_comes_back_under_its_own_number(rollout: Rollout, kind: Step) -> None:
    call = KINDS[kind](rollout)
    assert await rollout.heal(call, 5) == "OK"
    fields = rollout.fields
    assert {name for name in fields if name.startswith(b"o:")} == {b"o:1", b"o:5"}
    assert rollout.state["seq"] == b"5"
    assert len(fields) == hash_fields(rollout.state) - 3  # steps 2 to 4
    assert await rollout.heal(call, 5) == "SAME"
    assert rollout.fields == fields


@every_kind
async def test_a_step_that_was_not_lost_changes_nothing(rollout: Rollout, kind: Step) -> None:
    call = KINDS[kind](rollout)
    assert (await rollout.run(call)).code == "OK"
    for _ in range(2):
        fields = rollout.fields
        assert await rollout.heal(call, 2) == "SAME"
        assert rollout.fields == fields
        await rollout.freeze()


@every_kind
async def test_a_step_whose_number_went_to_another_makes_the_rollout_incomplete(
    rollout: Rollout, kind: Step
) -> None:
    await rollout.run(rollout.stage(b"m" * 16) if kind is Step.STAGE else rollout.begin("later"))
    assert await rollout.heal(KINDS[kind](rollout), 2) == ("OK" if kind is Step.MARK else "LOST")
    assert rollout.is_whole
    assert int(rollout.state["failures"]) == 1


@every_kind
async def test_a_frozen_rollout_is_marked_at_a_higher_version(rollout: Rollout, kind: Step) -> None:
    frozen = await rollout.freeze()
    assert await rollout.heal(KINDS[kind](rollout), 2) == ("OK" if kind is Step.MARK else "LOST")
    assert (rollout.state["failures"], rollout.state["records"]) == (b"1", b"0")
    assert int(rollout.state["version"]) > frozen.version
    assert rollout.is_whole


@every_kind
async def test_a_retired_rollout_stays_as_it_is(rollout: Rollout, kind: Step) -> None:
    await rollout.run(
        scripts.retire(rollout.key, incarnation=ATTEMPT, new_incarnation=NEW, tombstone_ttl_s=100)
    )
    before = rollout.fields
    assert await rollout.heal(KINDS[kind](rollout), 2) == "RETIRED"
    assert (await rollout.run(rollout.verify(9))).code == "RETIRED"
    assert rollout.fields == before


@every_kind
async def test_an_attempt_that_is_not_there_is_not_begun_again_but_marked_for_a_day(
    rollout: Rollout, kind: Step
) -> None:
    rollout.redis.delete(rollout.key.decode())
    assert await rollout.heal(KINDS[kind](rollout), 2) == "LOST"
    assert (rollout.state["incarnation"], rollout.state["failures"]) == (NEW.encode(), b"1")
    assert len(rollout.fields) == 3
    remaining_s: Any = rollout.redis.ttl(rollout.key.decode())
    assert 86_300 < remaining_s <= 86_400


@every_kind
async def test_another_attempt_gets_one_mark_and_nothing_else(rollout: Rollout, kind: Step) -> None:
    call = KINDS[kind](rollout)
    before = rollout.fields
    assert await rollout.heal(call, 2, LATER_ATTEMPT) == "LOST"
    marked = rollout.fields
    assert marked.keys() - before.keys() == {b"f:", b"o:2"}
    assert await rollout.heal(call, 3, LATER_ATTEMPT) == "LOST"
    assert (await rollout.run(rollout.verify(9, LATER_ATTEMPT))).code == "LOST"
    assert rollout.fields == marked


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind is not Step.MARK], ids=lambda kind: kind.name
)
async def test_a_step_of_unknown_number_shows_whether_it_was_lost(rollout: Rollout, kind: Step) -> None:
    call = KINDS[kind](rollout)
    await rollout.run(call)
    await rollout.freeze()
    before = rollout.fields
    assert await rollout.heal(call, 0) == "SAME"
    assert rollout.fields == before
    change_state(rollout.redis, rollout.key, status=b"open", snapshot=b"")
    other = {Step.STAGE: rollout.stage(b"m" * 16), Step.PUT: rollout.put("lost")}
    assert await rollout.heal(other.get(kind) or rollout.begin("lost"), 0) == "LOST"
    assert rollout.is_whole


async def test_a_put_with_other_content_is_a_conflict_wherever_it_comes_back(rollout: Rollout) -> None:
    await rollout.run(rollout.put("call"))
    for seq in (2, 3, 1, 0):
        assert await rollout.heal(rollout.put("call", model="another"), seq) == "CONFLICT"
    assert (await rollout.snapshot()).reasons[0].code == IncompleteCode.CONFLICT


async def test_a_refusal_of_a_call_that_was_refused_otherwise_is_lost(rollout: Rollout) -> None:
    await rollout.run(rollout.refuse("call"))
    for seq in (3, 2):  # another step's number, and its own
        assert await rollout.heal(rollout.refuse("call", "other"), seq) == "LOST"
    assert (IncompleteCode.LOST_STEPS, "call") in [
        (reason.code, reason.model_call_id) for reason in (await rollout.snapshot()).reasons
    ]


async def test_what_came_back_in_another_way_takes_its_number_all_the_same(rollout: Rollout) -> None:
    await rollout.run(rollout.put("call"))
    assert await rollout.heal(rollout.begin("call"), 3) == "SAME"
    assert await rollout.heal(rollout.put("call"), 4) == "SAME"
    assert rollout.is_whole
    snapshot = await rollout.snapshot()
    assert [reason.code for reason in snapshot.reasons] == [IncompleteCode.LOST_CALL]
    assert [entry.model_call_id for entry in snapshot.entries] == ["call"]


async def test_a_part_that_came_back_in_another_way_is_no_loss_the_next_time(rollout: Rollout) -> None:
    await rollout.run(rollout.stage())
    for _ in range(2):
        assert await rollout.heal(rollout.stage(), 3) == "SAME"
    assert rollout.is_whole
    assert b"f:" not in rollout.fields


async def test_a_put_without_its_blocks_claims_its_number(rollout: Rollout) -> None:
    prompt = random_ids(600)
    put = rollout.put("call", first_block=1, prompt_token_ids=prompt)
    assert await rollout.heal(put, 3) == "MISSING"
    assert rollout.state["seq"] == b"3"
    assert await rollout.heal(rollout.put("other", prompt_token_ids=prompt), 2) == "OK"
    assert await rollout.heal(put, 3) == "OK"
    assert rollout.is_whole


async def test_blocks_that_come_back_out_of_order_are_read(rollout: Rollout) -> None:
    prompt = random_ids(900)
    longer = rollout.put("longer", first_block=1, prompt_token_ids=prompt)
    shorter = rollout.put("shorter", prompt_token_ids=prompt[:300])
    assert await rollout.heal(shorter, 3) == "OK"
    assert await rollout.heal(longer, 2) == "OK"
    snapshot = await rollout.snapshot()
    assert [reason.code for reason in snapshot.reasons] == [IncompleteCode.LOST_CALL]
    prompts = {entry.model_call_id: entry.prompt_token_ids for entry in snapshot.entries}
    assert prompts == {"longer": prompt, "shorter": prompt[:300]}


async def test_an_open_rollout_with_fewer_steps_is_short_of_them_until_they_come_back(
    rollout: Rollout,
) -> None:
    assert (await rollout.run(rollout.verify(3))).code == "OK"
    assert rollout.state["seq"] == b"3"
    for seq in (2, 3):
        assert not rollout.is_whole
        assert await rollout.heal(rollout.begin(f"call {seq}"), seq) == "OK"
    assert rollout.is_whole
    before = rollout.fields
    assert (await rollout.run(rollout.verify(3))).code == "OK"
    assert rollout.fields == before


@pytest.mark.parametrize("frozen", [False, True])
async def test_where_a_number_went_to_another_step_the_rollout_is_marked_once(
    rollout: Rollout, frozen: bool
) -> None:
    if frozen:
        await rollout.freeze()
    before = rollout.fields
    assert (await rollout.run(rollout.verify(1, own=(1, b"n:begun")))).code == "OK"
    assert rollout.fields == before
    for code in ("LOST", "OK"):
        reply = await rollout.run(rollout.verify(1, own=(1, b"n:other")))
        assert (reply.code, reply.seq) == (code, 2)
    assert rollout.is_whole


async def test_a_frozen_rollout_with_fewer_steps_is_marked_once(rollout: Rollout) -> None:
    frozen = await rollout.freeze()
    for _ in range(2):
        reply = await rollout.run(rollout.verify(3))
        assert (reply.code, reply.version) == ("LOST", frozen.version + 1)
    assert rollout.is_whole


@pytest.mark.parametrize(("seq", "named"), [(2, "2"), (4, "2–4"), (3_000, "2–3000")])  # noqa: RUF001
async def test_the_numbers_of_lost_steps_are_told(rollout: Rollout, seq: int, named: str) -> None:
    await rollout.run(rollout.verify(seq))
    lost, open_call = (await rollout.snapshot()).reasons
    assert (lost.code, lost.model_call_id) == (IncompleteCode.LOST_STEPS, "")
    assert lost.detail == f"the server lost its steps {named}"
    assert open_call.code == IncompleteCode.LOST_CALL


async def test_however_many_steps_a_damaged_state_tells_of_reading_ends(rollout: Rollout) -> None:
    change_state(rollout.redis, rollout.key, seq=b"9" * 15)
    codes = {reason.code for reason in (await rollout.snapshot()).reasons}
    assert codes == {IncompleteCode.LOST_STEPS, IncompleteCode.TAMPERED, IncompleteCode.LOST_CALL}


async def test_several_rollouts_are_put_back_in_one_script_call(rollout: Rollout) -> None:
    keys = [rollout_key(rollout.namespace, f"r{number}") for number in range(3)]
    for key in keys[:2]:
        await rollout.run(scripts.begin(key, "first", new_incarnation=ATTEMPT))
    healed = [
        scripts.heal(
            scripts.begin(key, "second", new_incarnation=ATTEMPT),
            seq=2,
            incarnation=ATTEMPT,
            new_incarnation=NEW,
        )
        for key in keys
    ]
    (answer,), _ = await rollout.link.pipeline(
        [scripts.command(healed, rollout.link.dialect, by_source=True)]
    )
    replies = scripts.read_replies(answer, 3, "")
    assert [reply.code for reply in replies if isinstance(reply, Reply)] == ["OK", "OK", "LOST"]
