"""A bound on what is under way: first come, first served, nothing leaks, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_capture_redis.inflight import ByteBudget, Hold

BOUND = 10
SETTLED = 5
"""Steps of the loop after which nothing moves any more: each await here takes one."""


async def settle() -> None:
    for _ in range(SETTLED):
        await asyncio.sleep(0)


def at_once(asking: Coroutine[Any, Any, Hold]) -> Hold:
    """What a coroutine returns without waiting for anything."""
    with pytest.raises(StopIteration) as returned:
        asking.send(None)
    held: Hold = returned.value.value
    return held


class Callers:
    """Tasks that ask for room, by name, in the order they came."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.tasks: dict[str, asyncio.Task[Hold]] = {}

    async def ask(self, **sizes: int) -> None:
        for name, nbytes in sizes.items():
            self.tasks[name] = asyncio.create_task(self.budget.hold(nbytes))
        await settle()

    def let_in(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task.done() and not task.cancelled()}

    async def end(self, name: str) -> None:
        self.tasks.pop(name).result().end()
        await settle()

    async def end_all(self) -> None:
        """Let every caller in and out, one after the other; whoever stays outside was forgotten."""
        while names := self.let_in():
            for name in names:
                await self.end(name)
        assert {name for name, task in self.tasks.items() if not task.done()} == set()
        assert self.budget.held_bytes == 0


@pytest.fixture
async def callers() -> Callers:
    return Callers(ByteBudget(BOUND))


# Room, and who gets it


@pytest.mark.parametrize("nbytes", [0, 1, BOUND, BOUND + 1, 10**12])
def test_where_nothing_is_held_anything_is_let_in_at_once(nbytes: int) -> None:
    budget = ByteBudget(BOUND)
    with at_once(budget.hold(nbytes)) as held:
        assert (held.nbytes, budget.held_bytes) == (nbytes, nbytes)
    assert budget.held_bytes == 0


def test_what_fits_beside_the_others_is_let_in_at_once() -> None:
    budget = ByteBudget(BOUND)
    held = [at_once(budget.hold(nbytes)) for nbytes in (3, 3, 4, 0)]
    assert budget.held_bytes == BOUND
    assert budget.try_hold(1) is None
    for one in held:
        one.end()
    assert budget.held_bytes == 0


async def test_a_small_one_does_not_overtake_a_large_one_that_waits(callers: Callers) -> None:
    await callers.ask(first=6, large=8, small=1)
    assert callers.let_in() == {"first"}
    assert callers.budget.try_hold(1) is None
    assert callers.budget.try_hold(0) is None
    await callers.end("first")
    assert callers.let_in() == {"large", "small"}
    await callers.end_all()


async def test_those_who_wait_are_let_in_in_their_order(callers: Callers) -> None:
    await callers.ask(first=BOUND, a=4, b=4, c=4, d=2)
    await callers.end("first")
    assert callers.let_in() == {"a", "b"}  # d would fit, and c came before it
    await callers.end("b")
    assert callers.let_in() == {"a", "c", "d"}
    await callers.end_all()


async def test_larger_than_the_bound_goes_alone(callers: Callers) -> None:
    await callers.ask(small=1, huge=5 * BOUND, next=1)
    assert callers.let_in() == {"small"}
    await callers.end("small")
    assert callers.let_in() == {"huge"}
    assert callers.budget.held_bytes == 5 * BOUND
    await callers.end("huge")
    assert callers.let_in() == {"next"}
    await callers.end_all()


async def test_several_that_are_larger_than_the_bound_go_one_after_the_other(callers: Callers) -> None:
    sizes = {f"huge{number}": BOUND + number for number in range(1, 6)}
    await callers.ask(**sizes)
    for name in sizes:
        assert callers.let_in() == {name}
        await callers.end(name)
    await callers.end_all()


# What a hold does


async def test_a_hold_that_grows_takes_more_without_waiting_and_gives_it_all_back(callers: Callers) -> None:
    await callers.ask(first=6, second=4, third=1)
    first = callers.tasks["first"].result()
    first.grow(5)
    assert (first.nbytes, callers.budget.held_bytes) == (11, 15)
    await callers.end("second")
    assert callers.let_in() == {"first"}  # 11 bytes are above the bound
    await callers.end("first")
    assert callers.let_in() == {"third"}
    assert callers.budget.held_bytes == 1
    await callers.end_all()


async def test_a_hold_of_nothing_may_grow_and_stands_in_the_way_then(callers: Callers) -> None:
    await callers.ask(first=0)
    callers.tasks["first"].result().grow(BOUND)
    await callers.ask(second=1)
    assert callers.let_in() == {"first"}
    await callers.end_all()


async def test_ending_a_hold_again_changes_nothing(callers: Callers) -> None:
    await callers.ask(first=6, second=4)
    first = callers.tasks["first"].result()
    with first:
        first.end()
        first.end()
    assert (first.nbytes, callers.budget.held_bytes) == (0, 4)
    await callers.end_all()


def test_a_hold_ends_with_its_block_whatever_happens_there() -> None:
    budget = ByteBudget(BOUND)
    held = at_once(budget.hold(3))
    held.grow(4)
    with pytest.raises(ZeroDivisionError), held:
        _ = 1 / 0
    assert budget.held_bytes == 0


# Callers that leave


async def test_a_large_one_that_leaves_lets_in_those_behind_it(callers: Callers) -> None:
    await callers.ask(first=6, large=8, small=1, other=3)
    callers.tasks["large"].cancel()
    await settle()
    assert callers.let_in() == {"first", "small", "other"}
    assert callers.budget.held_bytes == BOUND
    await callers.end_all()


async def test_one_that_leaves_from_the_middle_of_the_queue_disturbs_no_order(callers: Callers) -> None:
    await callers.ask(first=BOUND, a=5, b=5, c=5, d=5)
    callers.tasks["b"].cancel()
    await callers.end("first")
    assert callers.let_in() == {"a", "c"}
    await callers.end_all()


async def test_one_that_leaves_before_it_has_asked_was_never_there(callers: Callers) -> None:
    await callers.ask(first=BOUND)
    task = asyncio.create_task(callers.budget.hold(1))
    task.cancel()
    await settle()
    assert task.cancelled()
    await callers.end_all()


ORDERS = {
    "it is let in, then it leaves": ("end", "cancel"),
    "it leaves, then it would be let in": ("cancel", "end"),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("steps_between", [0, 1, 2])
async def test_one_that_leaves_about_when_its_turn_comes_takes_no_room_along(
    callers: Callers, order: tuple[str, str], steps_between: int
) -> None:
    await callers.ask(first=BOUND, leaving=7, behind=8)
    first = callers.tasks.pop("first").result()
    leaving = callers.tasks["leaving"]
    for act in order:
        if act == "end":
            first.end()
        else:
            leaving.cancel()
        for _ in range(steps_between):
            await asyncio.sleep(0)
    await settle()
    if leaving.cancelled():
        assert callers.let_in() == {"behind"}
        assert callers.budget.held_bytes == 8
    else:
        assert (order[0], steps_between > 0) == ("end", True)
        assert callers.let_in() == {"leaving"}
    await callers.end_all()


async def test_all_that_leave_at_once_leave_nothing_behind(callers: Callers) -> None:
    await callers.ask(first=BOUND, **{f"c{number}": 1 + number for number in range(12)})
    for name in [*callers.tasks][1:]:
        callers.tasks[name].cancel()
    await callers.end("first")
    assert callers.let_in() == set()
    assert callers.budget.held_bytes == 0
    await callers.ask(next=BOUND)
    assert callers.let_in() == {"next"}
    await callers.end_all()


@pytest.mark.parametrize("late", [True, False], ids=["its turn came before", "its turn came after"])
async def test_a_deadline_that_passes_when_its_turn_comes_takes_no_room_along(
    callers: Callers, *, late: bool
) -> None:
    deadline = asyncio.timeout(None)

    async def wait_for_room() -> None:
        async with deadline:
            await callers.budget.hold(5)

    await callers.ask(first=BOUND)
    waiting = asyncio.create_task(wait_for_room())
    await settle()
    first = callers.tasks.pop("first").result()
    if late:
        first.end()
    deadline.reschedule(asyncio.get_running_loop().time() - 1)
    await asyncio.sleep(0)
    if not late:
        first.end()
    outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
    # Whoever was let in before the deadline was noticed may go on; here nobody ends the hold again.
    assert callers.budget.held_bytes == (0 if isinstance(outcome, TimeoutError) else 5)
    assert late or isinstance(outcome, TimeoutError)


# Any schedule, against a model that knows no event loop


@dataclass
class Model:
    """Who is inside, and who waits, in order."""

    inside: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return sum(self.inside.values())

    def ask(self, caller: int, nbytes: int) -> None:
        self.waiting[caller] = nbytes
        self._admit()

    def leave(self, caller: int) -> None:
        self.waiting.pop(caller, None)
        self.inside.pop(caller, None)
        self._admit()

    def _admit(self) -> None:
        while self.waiting:
            caller, nbytes = next(iter(self.waiting.items()))
            if self.held_bytes and self.held_bytes + nbytes > BOUND:
                return
            self.inside[caller] = self.waiting.pop(caller)


ASK, LEAVE, GROW = "ask", "leave", "grow"
sizes = st.sampled_from((0, 1, 2, 3, 5, 8, BOUND, BOUND + 1, 3 * BOUND))
acts = st.tuples(st.just(ASK), sizes) | st.tuples(st.just(LEAVE), st.integers(0, 9))
rounds = st.lists(acts, min_size=1, max_size=5) | st.tuples(st.just(GROW), st.integers(0, 9)).map(
    lambda act: [act]
)
"""What happens without a step of the loop in between. Growing is alone in a round, so that the model need
not know whether one that leaves has made room before it or after."""


class Schedule:
    """The same acts on a budget and on the model."""

    def __init__(self) -> None:
        self.budget, self.model = ByteBudget(BOUND), Model()
        self.asked: dict[int, asyncio.Task[Hold]] = {}
        self.inside: dict[int, Hold] = {}
        self._callers = 0

    def act(self, what: str, argument: int) -> None:
        if what == ASK:
            self._callers += 1
            self.asked[self._callers] = asyncio.create_task(self.budget.hold(argument))
            self.model.ask(self._callers, argument)
        elif what == LEAVE and (there := [*self.inside, *self.asked]):
            self.leave(there[argument % len(there)])
        elif what == GROW and self.inside:
            caller = [*self.inside][argument % len(self.inside)]
            self.inside[caller].grow(argument)
            self.model.inside[caller] += argument

    def leave(self, caller: int) -> None:
        """End the hold of one that was inside at the end of the last round, or cancel any other."""
        if caller in self.inside:
            self.inside.pop(caller).end()
        else:
            self.asked.pop(caller).cancel()
        self.model.leave(caller)

    async def compare(self) -> None:
        await settle()
        for caller, task in list(self.asked.items()):
            if task.done():
                self.inside[caller] = self.asked.pop(caller).result()
        assert {caller: held.nbytes for caller, held in self.inside.items()} == self.model.inside
        assert [*self.asked] == [*self.model.waiting]
        assert self.budget.held_bytes == self.model.held_bytes


@given(schedule=st.lists(rounds, max_size=25))
def test_any_schedule_does_what_the_model_does_and_ends_with_nothing_held(
    schedule: list[list[tuple[str, int]]],
) -> None:
    async def run() -> None:
        both = Schedule()
        for acts_at_once in schedule:
            for what, argument in acts_at_once:
                both.act(what, argument)
            await both.compare()
        while there := [*both.inside, *both.asked]:
            both.leave(there[-1])
            await both.compare()
        assert both.budget.held_bytes == 0
        assert both.budget.try_hold(BOUND) is not None, "somebody who left still waits"

    asyncio.run(run())
