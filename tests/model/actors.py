"""Workers, trainers and a server that may forget: what each may do next, and what must hold whenever it does.

A *world* is one moment of a history; ``moves`` gives every next moment. What workers and readers believe is
in them; what only the checker knows (who was promised what) is in the world's ledger. An action that breaks a
promise raises ``Broken``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from model.healing import HealRules, Kept, Seen, heal, snapshot_of, verify
from model.steps import STEPS, Reply, StepFunction, Stored


class Broken(AssertionError):  # noqa: N818 - a promise is broken
    """A promise of the contract was broken."""


class Message(NamedTuple):
    """A step on its way to the server."""

    step: str
    args: tuple[object, ...]
    consumed: Seen | None = None
    """Of a drop, what its sender saw."""


class Task(NamedTuple):
    """What a worker does for a call."""

    step: str
    call: str
    more: tuple[object, ...] = ()
    """Of a put the content, the block it goes on from and those it brings; of a refusal its code."""


class Announced(NamedTuple):
    """What announcing (or joining) was answered."""

    call: str
    incarnation: str
    run: int
    joined: bool


class Position(NamedTuple):
    """How far the rollout was when the server last answered, and the worker's own newest step."""

    incarnation: str
    seq: int
    run: int
    own: int = 0
    trace: str = ""


class Worker(NamedTuple):
    """A sink and its caller."""

    program: tuple[Task, ...]
    """What it has still to do."""
    alive: bool = True
    run: int = 0
    """Server that it spoke to last and has healed; 0 before its first connection."""
    sent: Message | None = None
    """What it waits for, or has given up waiting for and will send again."""
    announced: tuple[Announced, ...] = ()
    kept: tuple[Kept, ...] = ()
    position: Position | None = None


class Held(NamedTuple):
    """A snapshot as a trainer holds it."""

    snapshot: str
    version: int
    seen: Seen


class Asked(NamedTuple):
    """What a trainer was told by ``peek``, before it retires or deletes that attempt."""

    ending: str
    incarnation: str
    tombstone: str
    """Incarnation for the tombstone of an unknown rollout."""


class Reader(NamedTuple):
    """A trainer."""

    held: Held | None = None
    reading: Held | None = None
    """A frozen rollout of which it has the first chunk."""
    incarnation: str = ""
    """Of what it is reading."""
    asked: Asked | None = None


class Facts(NamedTuple):
    """What the server has promised to readers; it forgets this with the rollout."""

    fenced: frozenset[str] = frozenset()
    """Attempts that were frozen."""
    deleted: frozenset[str] = frozenset()
    """Attempts that were deleted."""
    shown: tuple[str, Held] | None = None
    """The newest snapshot given, and of which attempt."""
    marks: frozenset[str] = frozenset()
    """Ids of the marks that were made."""


class Disk(NamedTuple):
    """A state of the server."""

    rollout: Stored = None
    facts: Facts = Facts()


class Acked(NamedTuple):
    """A promise given to a worker: its call was announced (``n``), recorded, refused, or marked (``f``)."""

    incarnation: str
    call: str
    what: str
    seq: int
    run: int
    """Which server gave it."""
    heard: frozenset[int]
    """Workers that can tell if it is lost: they know of the call, or of its number or a later one."""


class Spilled(NamedTuple):
    """A mark that failed, as it is in the file."""

    mark_id: str
    incarnation: str
    run: int
    call: str


class Budget(NamedTuple):
    """How often what disturbs may still happen."""

    copies: int = 0
    """Messages that arrive late, or a second time."""
    restarts: int = 0
    crashes: int = 0
    """Workers that die."""
    endings: int = 0
    """Retirements and deletions."""
    spills: int = 0
    replays: int = 0
    settlings: int = 0
    """Moments when nothing has happened for so long that all acknowledged steps are durable."""


class World(NamedTuple):
    """One moment of a history."""

    now: Disk
    durable: Disk
    """What the next restart will bring back, unless a later state becomes durable before."""
    run: int
    young: bool
    """Whether the server started so short a time ago that workers may still have to put back steps."""
    workers: tuple[Worker, ...]
    readers: tuple[Reader, ...]
    under_way: frozenset[Message]
    spilled: tuple[Spilled, ...]
    budget: Budget
    names: int
    """How many names of attempts and snapshots were given."""
    acked: frozenset[Acked]
    forgot: bool
    """Whether a restart has lost anything."""
    quiet: bool
    """Whether the last restart lost nothing and all workers had healed before."""


@dataclass(frozen=True)
class Protocol:
    """The rules that all keep. Each that is switched off is a fault that the checker must find."""

    steps: dict[str, StepFunction] = field(default_factory=lambda: dict(STEPS))
    healing: HealRules = field(default_factory=HealRules)
    heals: bool = True
    verifies: bool = True
    verifies_own: bool = True
    """Whose step has the number of a worker's newest one, too."""
    freeze_waits: bool = True
    """On a young server."""
    read_waits: bool = True
    drop_waits: bool = True
    names_anew: bool = True
    """No two copies of a message bring the same name for a new attempt or snapshot."""
    replays_by_attempt: bool = True
    replays_by_id: bool = True


@dataclass(frozen=True)
class Scenario:
    """Who takes part, and how much may go wrong."""

    name: str
    programs: tuple[tuple[Task, ...], ...]
    readers: int
    budget: Budget
    in_time: bool = True
    """Whether every living worker puts back its steps before the server counts as settled."""
    chunks: bool = False
    """Whether a trainer may read a rollout in two chunks."""
    forgets_all: bool = False
    """Whether a restart loses everything (durability ``memory``)."""
    forgets_old: bool = False
    """Whether it may lose what was acknowledged long ago and is not kept any more (also by a failover)."""
    protocol: Protocol = Protocol()

    def first(self) -> World:
        return World(
            now=Disk(),
            durable=Disk(),
            run=1,
            young=False,
            workers=tuple(Worker(program) for program in self.programs),
            readers=(Reader(),) * self.readers,
            under_way=frozenset(),
            spilled=(),
            budget=self.budget,
            names=0,
            acked=frozenset(),
            forgot=False,
            quiet=True,
        )


Move = tuple[str, World]
"""What happened, with the code of the reply, and the world after it."""

Outcomes = Iterator[tuple[str, World, Reply | None]]
"""How sending a message may end: a word, the world, the reply or None where it is not there yet."""


def moves(world: World, scenario: Scenario) -> Iterator[Move]:
    """Everything that may happen next."""
    yield from _server_moves(world, scenario)
    for number, worker in enumerate(world.workers):
        if worker.alive:
            yield from _worker_moves(world, scenario, number, worker)
    for number, reader in enumerate(world.readers):
        yield from _reader_moves(world, scenario, number, reader)
    for message in world.under_way:
        yield _arrive_late(world, scenario, message)


# The server ----------------------------------------------------------------------------------------------


def _server_moves(world: World, scenario: Scenario) -> Iterator[Move]:
    budget = world.budget
    if budget.restarts:
        if world.durable != world.now and not scenario.forgets_all:
            yield "server: all is durable", world._replace(durable=world.now)
        yield "server: restarts", _restarted(world)
    if world.young and (not scenario.in_time or _all_have_healed(world)):
        yield "server: is not young any more", world._replace(young=False)
    if budget.settlings and not world.young and _all_have_healed(world):
        workers = tuple(
            worker._replace(kept=(), position=worker.position if scenario.forgets_old else None)
            for worker in world.workers
        )
        yield (
            "server: quiet for settle_s",
            world._replace(
                workers=workers,
                durable=world.durable if scenario.forgets_old else world.now,
                budget=budget._replace(settlings=budget.settlings - 1),
            ),
        )


def _restarted(world: World) -> World:
    lossless = world.durable == world.now
    return world._replace(
        now=world.durable,
        run=world.run + 1,
        young=True,
        under_way=frozenset(),  # a message is lost with the connection that it came on
        budget=world.budget._replace(restarts=world.budget.restarts - 1),
        forgot=world.forgot or not lossless,
        quiet=lossless and _all_have_healed(world),
    )


def _all_have_healed(world: World) -> bool:
    return all(not worker.alive or worker.run in (0, world.run) for worker in world.workers)


def _apply(world: World, scenario: Scenario, message: Message) -> tuple[World, Reply]:
    """Run a step on the server."""
    before, facts = world.now.rollout, world.now.facts
    after, reply = scenario.protocol.steps[message.step](before, *message.args)
    acked = world.acked
    match message.step, reply.code:
        case "put", "OK":
            _check(reply.incarnation not in facts.fenced, "a new put succeeded after the freeze")
            _check(before is not None, "a put began a rollout")
            announced = any((each.incarnation, each.call) == message.args[:2] for each in acked)
            fresh = announced or reply.incarnation not in facts.deleted
            _check(fresh, "a record of a deleted attempt came into a new one")
        case "mark", "OK":
            facts = facts._replace(marks=facts.marks | {str(message.args[3])})
        case "freeze", "OK":
            assert after is not None
            facts = facts._replace(fenced=facts.fenced | {reply.incarnation})
        case "drop", "OK" if before and before.status == "frozen":
            assert message.consumed is not None
            consumed = _agree(snapshot_of(before), message.consumed)
            _check(consumed, "a drop removed what was not consumed")
            _check_nothing_lost(world, scenario, snapshot_of(before), before.incarnation)
        case "delete", "OK" if before:
            facts = facts._replace(deleted=facts.deleted | {before.incarnation})
            acked = frozenset()  # the trainer has no use any more for whatever was promised
    return _stored(world, after, facts)._replace(acked=acked), reply


def _stored(world: World, after: Stored, facts: Facts) -> World:
    before = world.now.rollout
    new_name = after is not None and after.incarnation == _new_name(world) and before != after
    return world._replace(now=Disk(after, facts), names=world.names + new_name)


def _new_name(world: World) -> str:
    return f"i{world.names + 1}"


def _check(holds: bool, promise: str) -> None:
    if not holds:
        raise Broken(promise)


# On the way ----------------------------------------------------------------------------------------------


def _send(world: World, scenario: Scenario, message: Message) -> Outcomes:
    """Send a message: it is answered, perhaps with a copy still to come, or it is only on its way."""
    after, reply = _apply(world, scenario, message)
    yield "", after, reply
    if world.budget.copies and message not in world.under_way:
        budget = world.budget._replace(copies=world.budget.copies - 1)
        names = world.names + any(arg == _new_name(world) for arg in message.args)
        if message.step != "peek":
            sent = after._replace(budget=budget, names=max(names, after.names))
            copy = _again(sent, scenario, message)
            yield (
                ", a copy comes later",
                sent._replace(under_way=world.under_way | {copy}, names=sent.names + (copy != message)),
                reply,
            )
        delayed = world._replace(under_way=world.under_way | {message}, budget=budget, names=names)
        yield ", delayed", delayed, None


def _again(world: World, scenario: Scenario, message: Message) -> Message:
    """The same message, to be sent another time (``scripts.again``)."""
    if not scenario.protocol.names_anew:
        return message
    match message.step:
        case "join" | "begin" | "mark" | "refuse":
            return message._replace(args=(_new_name(world), *message.args[1:]))
        case "freeze":
            return message._replace(args=(_new_name(world), f"s{world.names + 1}"))
    return message


def _arrive_late(world: World, scenario: Scenario, message: Message) -> Move:
    """Deliver a message that nobody waits for any more."""
    after, reply = _apply(world._replace(under_way=world.under_way - {message}), scenario, message)
    there = world.now.rollout
    meant = _attempt_meant(message)
    if meant and there and meant not in (there.incarnation, there.snapshot):
        _check(after.now.rollout == there, "a delayed duplicate touched another attempt")
    return f"network: {message.step}{message.args} arrives late: {reply.code}", after


def _attempt_meant(message: Message) -> str:
    """Incarnation, or for a drop the snapshot, that the message names; '' for none."""
    place = {"put": 0, "stage": 0, "mark": 1, "refuse": 1, "retire": 0, "delete": 0, "drop": 0}.get(
        message.step
    )
    return "" if place is None else str(message.args[place])


# Workers -------------------------------------------------------------------------------------------------


def _worker_moves(world: World, scenario: Scenario, number: int, worker: Worker) -> Iterator[Move]:
    name = f"worker {number}"
    if world.budget.crashes:
        budget = world.budget._replace(crashes=world.budget.crashes - 1)
        yield f"{name}: dies", _with_worker(world, number, Worker((), alive=False))._replace(budget=budget)
    if worker.run not in (0, world.run) and scenario.protocol.heals:
        yield from _heal_moves(world, scenario, number, worker)
        return
    worker = worker._replace(run=world.run)
    for at, kept in enumerate(worker.kept):
        if kept.run != world.run:
            yield _put_back(world, scenario, number, worker, at)
    yield from _replay_moves(world, scenario, number, worker)
    if not worker.program:
        return
    task = worker.program[0]
    if worker.sent:
        message = _again(world, scenario, worker.sent)
    else:
        message = _message(world, worker, task, f"{name} {task.call}")
    for how, after, reply in _send(world, scenario, message):
        if reply is None:
            waiting = worker._replace(sent=message)
            yield f"{name}: {task.step} {task.call}{how}", _with_worker(after, number, waiting)
        else:
            handled = _handle(after, number, worker, task, message, reply)
            yield f"{name}: {task.step} {task.call}: {reply.code}{how}", handled
    if worker.sent:
        yield f"{name}: gives up {task.step} {task.call}", _given_up(world, number, worker, task)


def _with_worker(world: World, number: int, worker: Worker) -> World:
    workers = (*world.workers[:number], worker, *world.workers[number + 1 :])
    return world._replace(workers=workers)


def _message(world: World, worker: Worker, task: Task, mark_id: str) -> Message:
    """What the sink sends for a task."""
    told = next((each for each in worker.announced if each.call == task.call), None)
    named = told.incarnation if told and not told.joined and task.more != ("unnamed",) else ""
    new_name = _new_name(world)
    match task.step:
        case "join":
            return Message("join", (new_name,))
        case "begin":
            return Message("begin", (new_name, task.call))
        case "mark":
            return Message("mark", (new_name, named, task.call, mark_id))
        case "refuse":
            return Message("refuse", (new_name, named, task.call, *task.more))
    assert told is not None
    return Message(task.step, (told.incarnation, task.call, *task.more))


def _handle(world: World, number: int, worker: Worker, task: Task, message: Message, reply: Reply) -> World:
    """What the sink and its caller make of a reply."""
    rest = worker.program[1:]
    worker = worker._replace(sent=None, program=rest)
    match task.step, reply.code:
        case (("join" | "begin"), ("OK" | "SAME")):
            told = Announced(task.call, reply.incarnation, world.run, task.step == "join")
            worker = _noted(worker, world.run, reply, f"n:{task.call}" if task.step == "begin" else "")
            worker = worker._replace(announced=(*worker.announced, told))
            if task.step == "begin":
                world = _promised(world, number, reply, task.call, "n")
        case "begin", _:
            worker = worker._replace(program=tuple(each for each in rest if each.call != task.call))
        case "put", "MISSING":
            content, _, _, *more = task.more
            again = Task("put", task.call, (content, "", (), *more))
            worker = worker._replace(program=(again, *rest))
        case (("put" | "refuse"), ("OK" | "SAME")):
            kind = "r" if task.step == "put" else "x"
            worker = _noted(worker, world.run, reply, f"{kind}:{task.call}")
            what = f"{kind}:{task.more[0]}"
            world = _promised(world, number, reply, task.call, what)
        case "put", _:
            worker = worker._replace(program=(Task("mark", task.call), *rest))
        case "mark", "OK" | "SAME":
            worker = _noted(worker, world.run, reply, f"f:{task.call}")
            world = _promised(world, number, reply, task.call, "f")
        case "mark", "RETIRED" if task.more != ("unnamed",) and _may_be_another(world, worker, task.call):
            worker = worker._replace(program=(Task("mark", task.call, ("unnamed",)), *rest))
    if task.step != "join" and reply.code in ("OK", "SAME"):
        kept = _to_keep(message, reply, world.run, known=reply.code == "OK")
        worker = worker._replace(kept=(*worker.kept, kept))
    return _with_worker(world, number, worker)


def _promised(world: World, number: int, reply: Reply, call: str, what: str) -> World:
    """Write down what a worker was promised, and that it has heard of all numbers up to this one."""
    heard = frozenset(
        each._replace(heard=each.heard | {number})
        if (each.incarnation, each.run) == (reply.incarnation, world.run) and each.seq <= reply.seq
        else each
        for each in world.acked
    )
    return world._replace(
        acked=heard | {Acked(reply.incarnation, call, what, reply.seq, world.run, frozenset({number}))}
    )


def _noted(worker: Worker, run: int, reply: Reply, trace: str) -> Worker:
    """Remember how far the rollout was, and the worker's own newest step."""
    own = (reply.seq, trace) if trace and reply.code == "OK" else (0, "")
    seq, before = reply.seq, worker.position
    if before and before.incarnation == reply.incarnation:
        own = max(own, (before.own, before.trace))
        seq = max(seq, before.seq) if before.run == run else seq
    return worker._replace(position=Position(reply.incarnation, seq, run, *own))


def _may_be_another(world: World, worker: Worker, call: str) -> bool:
    """Whether a mark that was refused must be made on whatever is there."""
    told = next((each for each in worker.announced if each.call == call and not each.joined), None)
    return told is not None and (told.run != world.run or _has_moved_on(worker, told))


def _has_moved_on(worker: Worker, told: Announced | None) -> bool:
    """Whether it has spoken to a later attempt of the rollout than the announced one."""
    position = worker.position
    return told is not None and position is not None and position.incarnation != told.incarnation


def _to_keep(message: Message, reply: Reply, run: int, *, known: bool) -> Kept:
    args = tuple(str(arg) if isinstance(arg, str) else arg for arg in message.args)
    match message.step:
        case "begin":
            args = ("", *args[1:])
        case "mark" | "refuse":
            args = ("", "", *args[2:])
    return Kept(message.step, args, reply.incarnation, reply.seq if known else 0, run)


def _given_up(world: World, number: int, worker: Worker, task: Task) -> World:
    """Handle that the deadline is over: nobody knows whether the step was applied."""
    rest = worker.program[1:]
    match task.step:
        case "begin" | "join":
            rest = tuple(each for each in rest if each.call != task.call)
        case "put":
            rest = (Task("mark", task.call), *rest)
        case "mark" if world.budget.spills:
            assert worker.sent is not None
            _, named, call, mark_id = map(str, worker.sent.args)
            told = next((each for each in worker.announced if each.call == call), None)
            named = "" if _has_moved_on(worker, told) else named
            spilled = Spilled(mark_id, named, told.run if told else 0, call)
            world = world._replace(
                spilled=(*world.spilled, spilled),
                budget=world.budget._replace(spills=world.budget.spills - 1),
            )
    return _with_worker(world, number, worker._replace(sent=None, program=rest))


# Putting back --------------------------------------------------------------------------------------------


def _heal_moves(world: World, scenario: Scenario, number: int, worker: Worker) -> Iterator[Move]:
    """Put back the next step that another server acknowledged; after the last, verify."""
    name, before = f"worker {number}", world.now.rollout
    at = next((at for at, kept in enumerate(worker.kept) if world.run not in (kept.run, kept.waits)), None)
    if at is None:
        position = worker.position
        code, after = "nothing to verify", world
        if position and position.run != world.run and scenario.protocol.verifies:
            own = (position.own, position.trace) if scenario.protocol.verifies_own else (0, "")
            stored, reply = verify(before, _new_name(world), position.incarnation, position.seq, *own)
            code, after = f"verify: {reply.code}", _healed(world, stored, position.incarnation)
            position = _noted(worker, world.run, reply, "").position if stored else None
        yield (
            f"{name}: {code}",
            _with_worker(after, number, worker._replace(run=world.run, position=position)),
        )
        return
    yield _put_back(world, scenario, number, worker, at)


def _put_back(world: World, scenario: Scenario, number: int, worker: Worker, at: int) -> Move:
    """Put back one step. One that is put back for the second time in vain is marked instead."""
    rules, kept, before = scenario.protocol.healing, worker.kept[at], world.now.rollout
    others = (*worker.kept[:at], *worker.kept[at + 1 :])
    name = f"worker {number}"
    if (
        worker.position
        and worker.position.run == kept.run
        and worker.position.incarnation != kept.incarnation
    ):
        gone = _with_worker(world, number, worker._replace(kept=others))
        return f"{name}: lets go of {kept.step} {kept.subject}: its attempt was over", gone
    stored, reply = heal(before, scenario.protocol.steps[kept.step], kept, _new_name(world), rules)
    if kept.step == "put" and reply.code == "OK":
        _check(reply.incarnation not in world.now.facts.fenced, "a put was put back after the freeze")
    remembered: tuple[Kept, ...] = ()
    match reply.code:
        case "OK" | "SAME":
            own = kept.own or (reply.seq if reply.code == "OK" else 0)
            remembered = (kept._replace(own=own, run=world.run, waits=0),)
        case "CONFLICT":
            mark = _lost_mark(kept, number, kept.incarnation, kept.subject, reply.seq, world.run)
            remembered = (mark,)
        case "MISSING" if kept.waits != world.run:
            remembered = (kept._replace(waits=world.run),)
        case "MISSING":
            remembered = (_lost_mark(kept, number, kept.incarnation, kept.subject, 0, kept.run),)
        case "LOST":
            call = kept.subject if reply.incarnation == kept.incarnation else ""
            mark = _lost_mark(kept, number, reply.incarnation, call, reply.seq, world.run)
            # Of a rollout that is not that attempt any more, there is one mark for all.
            if call or not any(
                other.args[2:] == mark.args[2:] and other.run == world.run for other in others
            ):
                remembered = (mark,)
    after = _healed(world, stored, kept.incarnation)
    worker = worker._replace(kept=(*worker.kept[:at], *remembered, *worker.kept[at + 1 :]))
    return f"{name}: puts back {kept.step} {kept.subject}: {reply.code}", _with_worker(after, number, worker)


def _lost_mark(kept: Kept, number: int, incarnation: str, call: str, own: int, run: int) -> Kept:
    """The mark that the server has lost a step, in place of the step."""
    call = "" if kept.step == "stage" else call
    return Kept("mark", ("", "", call, f"worker {number} {run} lost"), incarnation, own, run)


def _healed(world: World, stored: Stored, incarnation: str) -> World:
    before = world.now.rollout
    if world.quiet and before and before.incarnation == incarnation:
        # One that is marked already may get another mark: its number is not told to who finds it.
        _check(stored == before or bool(before.failures), "nothing was lost, and healing changed the rollout")
    return _stored(world, stored, world.now.facts)


# Spilled marks -------------------------------------------------------------------------------------------


def _replay_moves(world: World, scenario: Scenario, number: int, worker: Worker) -> Iterator[Move]:
    """Make the first mark of the spill file; if the answer is lost, it stays there."""
    if not world.spilled:
        return
    spilled, *rest = world.spilled
    protocol, before = scenario.protocol, world.now.rollout
    mark_id = spilled.mark_id if protocol.replays_by_id else f"{spilled.mark_id} {world.budget.replays}"
    named = spilled.incarnation if protocol.replays_by_attempt else ""
    message = Message("mark", (_new_name(world), named, spilled.call, mark_id))
    after, reply = _apply(world, scenario, message)
    if reply.code == "RETIRED" and named and spilled.run != world.run:
        message = Message("mark", (_new_name(world), "", spilled.call, mark_id))
        after, reply = _apply(world, scenario, message)
    if after.now.rollout != before:
        _check(spilled.mark_id not in world.now.facts.marks, "a spilled mark was made twice")
        if spilled.incarnation and before and spilled.run == world.run:
            _check(before.incarnation == spilled.incarnation, "a spilled mark touched another attempt")
    label = f"worker {number}: replays the mark of {spilled.call}: {reply.code}"
    if world.budget.replays:
        budget = world.budget._replace(replays=world.budget.replays - 1)
        yield f"{label}, answer lost", _with_worker(after, number, worker)._replace(budget=budget)
    if reply.code in ("OK", "SAME"):
        kept = _to_keep(message, reply, world.run, known=reply.code == "OK")
        worker = worker._replace(kept=(*worker.kept, kept))
        after = _promised(after, number, reply, spilled.call, "f")
    yield label, _with_worker(after, number, worker)._replace(spilled=tuple(rest))


# Trainers ------------------------------------------------------------------------------------------------


def _reader_moves(world: World, scenario: Scenario, number: int, reader: Reader) -> Iterator[Move]:
    name = f"reader {number}"
    if reader.asked:
        yield from _end_moves(world, scenario, number, reader, reader.asked)
        return
    if reader.reading:
        if world.young and scenario.protocol.read_waits:
            yield f"{name}: read waits", world
        else:
            yield _read_on(world, scenario, number, reader, reader.reading)
        return
    if world.young and scenario.protocol.freeze_waits:
        yield f"{name}: freeze waits", world
    else:
        yield from _freeze_moves(world, scenario, number, reader)
    if reader.held and not (world.young and scenario.protocol.drop_waits):
        snapshot, version, seen = reader.held
        for how, after, reply in _send(world, scenario, Message("drop", (snapshot, version), seen)):
            what = f"complete with {len(seen.records)}" if seen.complete else "incomplete"
            yield f"{name}: drop: {reply.code if reply else 'no answer'}{how}, {what}", after
    if world.budget.endings:
        budget = world.budget._replace(endings=world.budget.endings - 1)
        _, reply = STEPS["peek"](world.now.rollout)
        for ending in ("retire", "delete"):
            asking = reader._replace(asked=Asked(ending, reply.incarnation, _new_name(world)))
            after = _with_reader(world, number, asking)._replace(budget=budget, names=world.names + 1)
            yield f"{name}: peek: {reply.code}, to {ending}", after


def _freeze_moves(world: World, scenario: Scenario, number: int, reader: Reader) -> Iterator[Move]:
    """Freeze, and read it all at once or only the first chunk."""
    name = f"reader {number}"
    freeze = Message("freeze", (_new_name(world), f"s{world.names + 1}"))
    for how, after, reply in _send(world, scenario, freeze):
        code = reply.code if reply else "no answer"
        if reply is None or reply.code != "OK":
            yield f"{name}: freeze: {code}{how}", after
            continue
        state = after.now.rollout
        assert state is not None
        names = max(after.names, world.names + (reply.rest[0] == freeze.args[1]))
        told = after._replace(names=names)
        reading = Held(state.snapshot, state.version, snapshot_of(state))
        begun = reader._replace(reading=reading, incarnation=state.incarnation)
        if scenario.chunks:
            yield f"{name}: freeze: OK, first chunk{how}", _with_reader(told, number, begun)
        shown = _shown(told, scenario, number, reader, state.incarnation, reading)
        yield f"{name}: freeze: OK{how}", shown


def _with_reader(world: World, number: int, reader: Reader) -> World:
    readers = (*world.readers[:number], reader, *world.readers[number + 1 :])
    return world._replace(readers=readers)


def _read_on(world: World, scenario: Scenario, number: int, reader: Reader, reading: Held) -> Move:
    """Read the rest of what was frozen, if it still is that."""
    message = Message("read", (reader.incarnation, reading.snapshot, reading.version))
    after, reply = _apply(world, scenario, message)
    done = reader._replace(reading=None, incarnation="")
    if reply.code == "OK":
        assert world.now.rollout is not None
        same = _agree(snapshot_of(world.now.rollout), reading.seen)
        _check(same, "a mixture of two snapshots was read")
        after = _shown(after, scenario, number, done, reader.incarnation, reading)
    else:
        after = _with_reader(after, number, done)
    return f"reader {number}: read: {reply.code}", after


def _shown(
    world: World, scenario: Scenario, number: int, reader: Reader, incarnation: str, held: Held
) -> World:
    """Give a snapshot to a trainer."""
    facts = world.now.facts
    if facts.shown and facts.shown[0] == incarnation:
        earlier = facts.shown[1]
        _check(earlier.snapshot == held.snapshot, "a repeated freeze gave another snapshot id")
        same_version = earlier.version == held.version
        _check(
            not same_version or _agree(held.seen, earlier.seen), "repeated freezes disagree at one version"
        )
        _check(held.version >= earlier.version, "the version went back")
    _check_nothing_lost(world, scenario, held.seen, incarnation)
    shown = world._replace(now=Disk(world.now.rollout, facts._replace(shown=(incarnation, held))))
    return _with_reader(shown, number, reader._replace(held=held))


def _check_nothing_lost(world: World, scenario: Scenario, seen: Seen, incarnation: str) -> None:
    """A complete snapshot holds all that was promised, but what nobody who is left knows."""
    if not seen.complete:
        return
    for acked in world.acked:
        if not _is_in(acked, seen, incarnation) and not _is_excused(world, scenario, acked):
            raise Broken(f"a rollout that lost a call is complete: {acked}")


def _agree(now: Seen, earlier: Seen) -> bool:
    """Whether they show the same.

    Once a mark is forgotten, another one gets its version. Two snapshots of that version then differ in what
    they say is wrong, never in whether anything is.
    """
    if now.complete or earlier.complete:
        return now == earlier
    return (now.records, now.refusals, now.open_calls) == (
        earlier.records,
        earlier.refusals,
        earlier.open_calls,
    )


def _is_in(acked: Acked, seen: Seen, incarnation: str) -> bool:
    if acked.incarnation != incarnation:
        return False
    match acked.what[0]:
        case "n":
            return any(call == acked.call for call, _ in seen.records | seen.refusals)
        case "r":
            return (acked.call, acked.what[2:]) in seen.records
        case "x":  # with whichever code: who knows of the one that was lost may be gone
            return any(call == acked.call for call, _ in seen.refusals)
    return False


def _is_excused(world: World, scenario: Scenario, lost: Acked) -> bool:
    """Whether the server lost it and every worker that knew of the call is gone (or not back in time)."""
    return world.forgot and not any(
        world.workers[number].alive and (scenario.in_time or world.workers[number].run == world.run)
        for each in world.acked
        if (each.incarnation, each.call) == (lost.incarnation, lost.call)
        for number in each.heard
    )


def _end_moves(world: World, scenario: Scenario, number: int, reader: Reader, asked: Asked) -> Iterator[Move]:
    """Retire or delete the attempt that was there when asked."""
    done = reader._replace(asked=None)
    if asked.ending == "delete" and not asked.incarnation:
        yield f"reader {number}: nothing to delete", _with_reader(world, number, done)
        return
    args = (asked.incarnation, asked.tombstone) if asked.ending == "retire" else (asked.incarnation,)
    for how, after, reply in _send(world, scenario, Message(asked.ending, args)):
        label = f"reader {number}: {asked.ending}: {reply.code if reply else 'no answer'}{how}"
        yield label, _with_reader(after, number, done if reply else reader)
