"""Rows of a ledger that are put back: in their place, once, and with a failure where that cannot be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture.staging", reason="NeMo Gym stages externally from 0.7 on")

from support.backends import EVERY_KIND, place_of
from support.capture_ledger import calls_in, failures_in, staged

from gym_capture_redis import RedisCaptureLedger, scripts
from gym_capture_redis.gym.ledger_rows import LOST_REASON, row_of
from gym_capture_redis.keys import ledger_key
from gym_capture_redis.scripts import Call, Reply
from gym_capture_redis.subject import Subject

pytestmark = pytest.mark.usefixtures("names_as_given")

ATTEMPT = "1" * 32
LATER_ATTEMPT = "2" * 32
NEW = "3" * 32
KINDS = ["record", "fail"]


class Ledger:
    """A ledger with one row, and the steps that may be put back to it."""

    def __init__(self, place: Any, namespace: str) -> None:
        self.key = ledger_key(namespace, "r")
        self.client = RedisCaptureLedger(
            place.url, namespace=namespace, durability=place.durability, settle_s=0.001
        )
        self._redis = place.redis

    async def run(self, call: Call) -> Reply:
        executor = self.client._executors.get()
        return await executor.run(call, Subject("r"), deadline=executor.deadline())

    async def heal(self, call: Call, seq: int, incarnation: str = ATTEMPT) -> str:
        healed = scripts.heal(call, seq=seq, incarnation=incarnation, new_incarnation=NEW)
        return (await self.run(healed)).code

    def step(self, kind: str, call: str = "call", **fields: Any) -> Call:
        if kind == "fail":
            return scripts.fail(self.key, call, b'"why"', new_incarnation=NEW, incarnation=ATTEMPT)
        return scripts.record(
            self.key, call, row_of(staged("r", call, **fields).commit).stored, incarnation=ATTEMPT
        )

    async def says(self) -> list[Any]:
        manifest = await self.client.manifest("r")
        return [*calls_in(manifest), *failures_in(manifest)]

    @property
    def fields(self) -> dict[bytes, bytes]:
        return dict(self._redis.hgetall(self.key))


SAYS: dict[str, Any] = {"record": "call", "fail": ("call", "why")}


@pytest.fixture(params=EVERY_KIND)
async def ledger(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Ledger]:
    with place_of(request, namespace) as place:
        made = Ledger(place, namespace)
        await made.run(scripts.join(made.key, new_incarnation=ATTEMPT))
        assert (await made.run(made.step("record", "first"))).code == "OK"
        yield made
        await made.client.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_comes_back_under_its_own_number_and_those_before_it_are_missed(
    ledger: Ledger, kind: str
) -> None:
    assert await ledger.heal(ledger.step(kind), 4) == "OK"
    said = await ledger.says()
    assert len(said) == 4
    assert {"first", SAYS[kind], ("row-2", LOST_REASON), ("row-3", LOST_REASON)} == set(said)
    before = ledger.fields
    assert await ledger.heal(ledger.step(kind), 4) == "SAME"
    assert ledger.fields == before
    for seq in (2, 3):
        await ledger.heal(ledger.step("record", f"before-{seq}"), seq)
    assert calls_in(await ledger.client.manifest("r"))[:3] == ["first", "before-2", "before-3"]
    assert LOST_REASON not in str(await ledger.says())


@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_that_was_not_lost_changes_nothing(ledger: Ledger, kind: str) -> None:
    assert (await ledger.run(ledger.step(kind))).code == "OK"
    before = ledger.fields
    assert await ledger.heal(ledger.step(kind), 2) == "SAME"
    assert ledger.fields == before
    assert await ledger.says() == ["first", SAYS[kind]]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_whose_number_went_to_another_is_a_failure(ledger: Ledger, kind: str) -> None:
    await ledger.run(ledger.step("record", "later"))
    assert await ledger.heal(ledger.step(kind), 2) == "LOST"
    assert ("call", LOST_REASON) in await ledger.says()


async def test_a_row_that_another_one_has_replaced_is_a_failure(ledger: Ledger) -> None:
    await ledger.run(ledger.step("record", text="another"))
    for seq in (2, 3):  # its own number, and another
        assert await ledger.heal(ledger.step("record"), seq) == "LOST"
    assert await ledger.says() == ["first", "call", ("call", LOST_REASON)]


async def test_a_row_that_came_back_in_another_way_is_there_once(ledger: Ledger) -> None:
    for kind in KINDS:
        await ledger.run(ledger.step(kind, f"{kind} call"))
    for seq, kind in enumerate(KINDS, start=5):
        assert await ledger.heal(ledger.step(kind, f"{kind} call"), seq) == "SAME"
    await ledger.heal(ledger.step("record", "fourth"), 4)
    assert await ledger.says() == ["first", "record call", "fourth", ("fail call", "why")]


@pytest.mark.parametrize("kind", KINDS)
async def test_another_attempt_gets_one_failure_and_no_row(ledger: Ledger, kind: str) -> None:
    for seq in (2, 3):
        assert await ledger.heal(ledger.step(kind), seq, LATER_ATTEMPT) == "LOST"
    assert await ledger.says() == ["first", ("unknown", LOST_REASON)]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_attempt_that_is_not_there_is_marked_and_not_begun(ledger: Ledger, kind: str) -> None:
    await ledger.client.delete(["r"])
    assert await ledger.heal(ledger.step(kind), 2) == "LOST"
    assert await ledger.says() == [("unknown", LOST_REASON)]
    assert await ledger.client.has_rows("r")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_retired_ledger_stays_as_it_is(ledger: Ledger, kind: str) -> None:
    await ledger.client.retire(["r"])
    before = ledger.fields
    assert await ledger.heal(ledger.step(kind), 2) == "RETIRED"
    assert ledger.fields == before
