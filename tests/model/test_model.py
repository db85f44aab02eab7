"""Every history of small scenarios, and the promises that must hold at every moment of each.

The model is in four files: the steps (``steps.py``), what puts them back (``healing.py``), workers, trainers
and a server that may forget (``actors.py``), and the search (``explorer.py``). A scenario says who takes part
and how often something may go wrong. All its histories are visited, the shortest first: what holds is proven
within these bounds, and what does not comes with its shortest trace.

Bounds: one rollout id; two workers of up to three steps, a marker, up to two trainers; in each scenario a few
of: late messages and duplicates, restarts that lose any suffix, deaths of workers, ends of attempts, spilled
marks (``SCENARIOS``). ``CAPTURE_MODEL_DEEP=1`` visits larger scenarios too, in some minutes.

Not in the model: comparing later replies with what was heard before (``AttemptMemory.has_lost``), which can
only mark more; batches; bounds of memory. ``test_scripts_do_what_the_model_does.py`` ties it to the scripts.
"""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest
from model.actors import Budget, Protocol, Scenario, Task
from model.explorer import Explored, explore
from model.healing import HealRules
from model.steps import STEPS, Answer, Stored, drop, put

A = (Task("begin", "a"), Task("put", "a", ("A",)))
B = (Task("begin", "b"), Task("put", "b", ("B",)))
INTENT = (Task("begin", "b"),)
MARK = (Task("mark", "m"),)
FAILED = (Task("begin", "a"), Task("mark", "a"))
REFUSED = (Task("begin", "a"), Task("refuse", "a", ("full",)))
REFUSED_AGAIN = (Task("refuse", "a", ("full",)), Task("refuse", "a", ("busy",)))
UNANNOUNCED = (Task("join", "a"), Task("put", "a", ("A",)))
OTHER_CONTENT = (Task("join", "a"), Task("put", "a", ("Z",)))
BASE = (Task("begin", "a"), Task("put", "a", ("A", "", (), ("block",))))
ON_BASE = (Task("begin", "b"), Task("put", "b", ("B", "block", (), ("next",))))

SCENARIOS = (
    Scenario("a network that delays", (A, INTENT, MARK), 2, Budget(copies=1)),
    Scenario("a server that forgets", (A, B), 1, Budget(restarts=1, crashes=1)),
    Scenario("marks that are forgotten", (A, MARK), 1, Budget(restarts=1), chunks=True),
    Scenario("two restarts", (INTENT, MARK), 1, Budget(restarts=2)),
    Scenario(
        "a server without a file",
        (A, B),
        1,
        Budget(restarts=1, settlings=1),
        forgets_all=True,
        forgets_old=True,
    ),
    Scenario("a failover that loses old steps", (A, B), 1, Budget(restarts=1, settlings=1), forgets_old=True),
    Scenario("an id that is used again", (A, INTENT), 1, Budget(endings=1, copies=1)),
    Scenario("an id that is used again, a slow network", (A, ()), 1, Budget(endings=1, copies=2)),
    Scenario("an id that is used again, and a restart", (A, INTENT), 1, Budget(endings=1, restarts=1)),
    Scenario("a spilled mark", (FAILED, ()), 1, Budget(restarts=1, copies=1, spills=1, replays=1)),
    Scenario(
        "a spilled mark of an id that is used again",
        (FAILED, INTENT),
        1,
        Budget(endings=1, copies=1, spills=1, replays=1),
    ),
    Scenario("two contents", (UNANNOUNCED, OTHER_CONTENT), 1, Budget(restarts=1)),
    Scenario("refusals", (REFUSED, REFUSED_AGAIN), 1, Budget(restarts=1, crashes=1)),
    Scenario("blocks of another worker", (BASE, ON_BASE), 1, Budget(restarts=1, crashes=1)),
)

DEEP = (
    Scenario("a network that delays", (A, B, MARK), 2, Budget(copies=1)),
    Scenario("two trainers", (A, B), 2, Budget(restarts=1, crashes=1), chunks=True),
    Scenario("a marker", (A, INTENT, MARK), 1, Budget(restarts=1, crashes=1)),
    Scenario("a slow network", (A, INTENT), 1, Budget(endings=1, copies=2)),
    Scenario("numbers that others were told", (A, (*B, B[1])), 1, Budget(restarts=1, crashes=1)),
    Scenario("two restarts", (A, INTENT), 1, Budget(restarts=2, crashes=1)),
    Scenario("an id that is used again", (A, B), 1, Budget(endings=1, restarts=1)),
    Scenario("a spilled mark", (FAILED, MARK), 1, Budget(restarts=1, copies=1, spills=1, replays=1)),
    Scenario("workers that come late", (A, B), 1, Budget(restarts=1), in_time=False),
)

HAPPENINGS = (
    *(f"^worker .: {step} .: OK" for step in ("begin", "join", "put", "mark", "refuse")),
    *(f"^worker .: {step} .: SAME" for step in ("begin", "put", "mark", "refuse")),
    *(f"^worker .: {step} .: FROZEN" for step in ("begin", "put", "refuse")),
    *(f"^worker .: {step} .: RETIRED" for step in ("begin", "put", "mark", "refuse")),
    r"^worker .: put .: CONFLICT",
    r"^worker .: put .: MISSING",
    r"^worker .: refuse .: OTHER_CODE",
    r"^worker .: gives up (begin|put|mark)",
    r"^worker .: dies",
    *(f"^worker .: puts back {step} .: OK" for step in ("begin", "put", "mark", "refuse")),
    *(f"^worker .: puts back {step} .: SAME" for step in ("begin", "put", "mark", "refuse")),
    *(f"^worker .: puts back .*: {code}" for code in ("LOST", "MISSING", "CONFLICT", "RETIRED")),
    *(f"^worker .: verify: {code}" for code in ("OK", "LOST", "RETIRED")),
    *(f"^worker .: replays the mark of a: {code}" for code in ("OK", "SAME", "RETIRED")),
    r"^worker .: replays .* answer lost",
    *(
        f"^network: {step}.* arrives late: "
        for step in ("begin", "put", "mark", "freeze", "drop", "retire", "delete")
    ),
    r"^reader .: freeze: OK",
    r"^reader .: freeze: RETIRED",
    r"^reader .: freeze: OK, first chunk",
    r"^reader .: freeze waits",
    r"^reader .: read waits",
    *(f"^reader .: read: {code}" for code in ("OK", "CHANGED", "RETIRED")),
    r"^reader .: drop: OK.*, complete with 1",
    r"^reader .: drop: OK.*, complete with 2",
    r"^reader .: drop: OK.*, incomplete",
    r"^reader .: drop: STALE",
    r"^reader .: peek: (OK|ABSENT)",
    r"^reader .: (retire|delete): OK",
    r"^reader .: (retire|delete): CHANGED",
    r"^reader .: nothing to delete",
    r"^server: restarts",
    r"^server: all is durable",
    r"^server: is not young any more",
    r"^server: quiet for settle_s",
)
"""What must have happened in some history, or else a promise about it holds of nothing."""


def report(explored: Explored) -> str:
    return "\n    ".join((explored.broken, *explored.trace))


def test_every_promise_holds_and_all_that_may_happen_did() -> None:
    happened: Counter[str] = Counter()
    for scenario in SCENARIOS:
        explored = explore(scenario)
        assert not explored.broken, f"{scenario.name}: {report(explored)}"
        happened.update(explored.labels)
    missing = [pattern for pattern in HAPPENINGS if not any(re.search(pattern, label) for label in happened)]
    assert not missing


@pytest.mark.skipif(
    not os.environ.get("CAPTURE_MODEL_DEEP"), reason="minutes: only with CAPTURE_MODEL_DEEP=1"
)
@pytest.mark.parametrize("scenario", DEEP, ids=lambda scenario: scenario.name)
def test_every_promise_holds_in_larger_scenarios(scenario: Scenario) -> None:
    explored = explore(scenario)
    assert not explored.broken, report(explored)


# Faults that must be found -------------------------------------------------------------------------------


def put_into_frozen(there: Stored, *args: str, own: int = 0) -> Answer:
    """Put whether the rollout is frozen or not."""
    if there is None or there.status != "frozen":
        return put(there, *args, own=own)  # type: ignore[arg-type]
    after, answer = put(there._replace(status="open"), *args, own=own)  # type: ignore[arg-type]
    return after and after._replace(status="frozen"), answer


def put_into_any_attempt(there: Stored, incarnation: str, *args: str, own: int = 0) -> Answer:
    return put(there, there.incarnation if there else incarnation, *args, own=own)  # type: ignore[arg-type]


def drop_any_version(there: Stored, snapshot: str, version: int) -> Answer:
    return drop(there, snapshot, there.version if there else version)


def with_step(name: str, step: object) -> Protocol:
    return Protocol(steps={**STEPS, name: step})  # type: ignore[dict-item]


BROKEN = (
    (
        Scenario("puts are not fenced", (A,), 1, Budget(), protocol=with_step("put", put_into_frozen)),
        "a new put succeeded after the freeze",
    ),
    (
        Scenario(
            "puts do not name their attempt",
            (A, INTENT),
            1,
            Budget(endings=1, copies=1),
            protocol=with_step("put", put_into_any_attempt),
        ),
        "a delayed duplicate touched another attempt",
    ),
    (
        Scenario(
            "drops ignore the version", (A, MARK), 1, Budget(), protocol=with_step("drop", drop_any_version)
        ),
        "a drop removed what was not consumed",
    ),
    (
        Scenario("nothing is put back", (A,), 1, Budget(restarts=1), protocol=Protocol(heals=False)),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "a freeze does not wait", (A,), 1, Budget(restarts=1), protocol=Protocol(freeze_waits=False)
        ),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "reading does not wait",
            (A, MARK),
            1,
            Budget(restarts=1),
            chunks=True,
            protocol=Protocol(read_waits=False),
        ),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "a late begin brings the name that was told",
            (A,),
            1,
            Budget(endings=1, copies=1),
            protocol=Protocol(names_anew=False),
        ),
        "a record of a deleted attempt came into a new one",
    ),
    (
        Scenario(
            "a late freeze brings the name that was told",
            ((Task("begin", "a"), Task("begin", "b")),),
            1,
            Budget(endings=1, copies=1),
            protocol=Protocol(names_anew=False),
        ),
        "a drop removed what was not consumed",
    ),
    (
        Scenario(
            "a drop does not wait", (A, MARK), 1, Budget(restarts=1), protocol=Protocol(drop_waits=False)
        ),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "numbers that others were told are not verified",
            (A, (*B, B[1])),
            1,
            Budget(restarts=1, crashes=1),
            protocol=Protocol(verifies=False),
        ),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "whose step has a number is not verified",
            (A, B),
            1,
            Budget(restarts=1, settlings=1),
            forgets_old=True,
            protocol=Protocol(verifies_own=False),
        ),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "numbers that were taken meanwhile are no loss",
            (A, B),
            1,
            Budget(restarts=1, crashes=1),
            protocol=Protocol(healing=HealRules(sees_collisions=False), verifies_own=False),
        ),
        "a rollout that lost a call is complete",
    ),
    (
        Scenario(
            "what is there is put back all the same",
            (A,),
            1,
            Budget(restarts=1),
            protocol=Protocol(healing=HealRules(knows_its_own=False)),
        ),
        "nothing was lost, and healing changed the rollout",
    ),
    (
        Scenario(
            "an attempt that is not there is begun again",
            (A, INTENT),
            1,
            Budget(endings=1, restarts=1),
            protocol=Protocol(healing=HealRules(marks_absent=False)),
        ),
        "a record of a deleted attempt",
    ),
    (
        Scenario(
            "a spilled mark has another id each time",
            (FAILED, ()),
            1,
            Budget(copies=1, spills=1, replays=1),
            protocol=Protocol(replays_by_id=False),
        ),
        "a spilled mark was made twice",
    ),
    (
        Scenario(
            "a spilled mark does not name its attempt",
            (FAILED, INTENT),
            1,
            Budget(endings=1, copies=1, spills=1),
            protocol=Protocol(replays_by_attempt=False),
        ),
        "a spilled mark touched another attempt",
    ),
)


@pytest.mark.parametrize(("scenario", "promise"), BROKEN, ids=lambda it: getattr(it, "name", ""))
def test_a_broken_protocol_is_found_out(scenario: Scenario, promise: str) -> None:
    explored = explore(scenario)
    assert explored.broken
    assert explored.broken.startswith(promise), report(explored)
