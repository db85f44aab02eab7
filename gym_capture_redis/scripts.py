"""The atomic steps: builds each call and reads each reply, without any I/O.

Each step is one Lua file on one key (``lua/*.lua``, whose headers say what it takes, answers and
whether it may be repeated: all of them may). Async and sync clients share this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from itertools import starmap
from typing import Any, Literal, NamedTuple

from redis.exceptions import ResponseError

from gym_capture_redis.blocks import NAME_BYTES, ROOT
from gym_capture_redis.codec import EncodedRecord
from gym_capture_redis.keys import BLOCK, PART, RECORDED, new_name, refusal_row
from gym_capture_redis.parts import PART_BYTES
from gym_capture_redis.script_files import read as read_file
from gym_capture_redis.script_files import script

FORMAT = 1
"""The newest storage format this version reads and writes."""

Argument = bytes | str | int


class Dialect(NamedTuple):
    """How a script is written for a connection.

    ``flagged``: with the first line that only real servers understand. ``confirmed``: for one that waits
    until what it wrote is durable: a step that finds all done writes something even so, or else the wait
    would not cover the one that did it.
    """

    flagged: bool = True
    confirmed: bool = False


class Step(Enum):
    """A step, by the name of its file, and the flags that its script carries on a real server.

    Without flags Redis refuses a script at its memory limit before it runs; what must work there
    (marking, refusing, reading and all that frees memory) says ``allow-oom``. None says ``no-writes``, which
    a replica would run as well, on old data.
    """

    JOIN = ("join", "")
    BEGIN = ("begin", "")
    STAGE = ("stage", "")
    PUT = ("put", "")
    MARK = ("mark", "allow-oom")
    REFUSE = ("refuse", "allow-oom")
    FREEZE = ("freeze", "allow-oom")
    READ = ("read", "allow-oom")
    DROP = ("drop", "allow-oom")
    PEEK = ("peek", "allow-oom")
    RETIRE = ("retire", "allow-oom")
    DELETE = ("delete", "allow-oom")
    INDEX = ("index", "allow-oom")
    BLOCKS = ("blocks", "allow-oom")
    VERIFY = ("verify", "allow-oom")
    RECORD = ("record", "")
    FAIL = ("fail", "allow-oom")
    ROWS = ("rows", "allow-oom")
    FIELDS = ("fields", "allow-oom")
    FETCH = ("HGET", "")
    """No script but Redis' own command: a script would get a copy of all that it hands on."""

    @cache
    def source(self, dialect: Dialect, *, healing: bool = False) -> bytes:
        """Lua source; ``healing`` puts back steps that were acknowledged before, at the memory limit too."""
        name, flags = self.value
        if healing:
            flags = "allow-oom"
        first_lines = [
            _first_line(name, dialect, flags),
            f"local FORMAT = '{FORMAT}'",
            f"local CONFIRMED = {'true' if dialect.confirmed and self.writes else 'false'}",
        ]
        if not healing:
            return script(first_lines, name, [], runner="_each")
        kind, named = _TRACES[self]
        return script(first_lines, name, [f"local KIND, NAMED = '{kind}', {named}"], runner="_heal")

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        return self not in (Step.PEEK, *_LONG_READS)

    @property
    def needs_settled_server(self) -> bool:
        """Whether it must wait while workers may be putting back what the server forgot."""
        return self in (Step.FREEZE, Step.READ, Step.FETCH, Step.DROP, Step.ROWS)

    @property
    def is_short(self) -> bool:
        """Whether one call of the script may hold many of these steps: their work is small and bounded."""
        return self not in (Step.FREEZE, *_LONG_READS)

    @property
    def is_script(self) -> bool:
        """Whether it is a script, not one of Redis' own commands."""
        return self is not Step.FETCH

    @cache
    def sha1(self, dialect: Dialect, *, healing: bool = False) -> str:
        """The name under which EVALSHA finds the script."""
        return hashlib.sha1(self.source(dialect, healing=healing), usedforsecurity=False).hexdigest()


def _first_line(name: str, dialect: Dialect, flags: str) -> str:
    """Of a script: its flags, which only real servers understand, or else a remark."""
    return "#!lua" + (f" flags={flags}" if flags else "") if dialect.flagged else f"-- {name}"


_LONG_READS = (Step.READ, Step.INDEX, Step.BLOCKS, Step.ROWS, Step.FIELDS, Step.FETCH)

_TRACES = {
    Step.BEGIN: ("n:", 2),
    Step.STAGE: ("p:", 3),
    Step.PUT: ("r:", 2),
    Step.REFUSE: ("x:", 3),
    Step.MARK: ("f:", 3),
    Step.RECORD: ("r:", 2),
    Step.FAIL: ("x:", 3),
}
"""How a trace of the step begins, and which of its arguments names the call (or the part)."""

CAN_BE_LOST = tuple(_TRACES)
"""Steps that add something to a rollout, which a forgetful server must get back."""


@dataclass(frozen=True)
class Call:
    """One step to run on one key."""

    step: Step
    key: bytes
    args: tuple[Argument, ...]
    reply_bytes: int = 0
    """About how much it may be answered with, if that is much."""
    healing: bool = False
    """Whether it puts the step back."""
    nbytes: int = field(init=False)
    """Bytes of the variable arguments: what all but the shortest calls send."""

    def __post_init__(self) -> None:
        """Count the bytes once: each call is asked for them several times."""
        object.__setattr__(self, "nbytes", sum([len(arg) for arg in self.args if isinstance(arg, bytes)]))


_NEW_NAMES = {Step.JOIN: 1, Step.BEGIN: 1, Step.MARK: 1, Step.REFUSE: 1, Step.FREEZE: 2, Step.FAIL: 1}
"""How many arguments of a step come first that are names for something new."""


def again(call: Call) -> Call:
    """The same step, to be sent another time.

    A copy that was sent before may still arrive, after the attempt is over and its id free. So no two copies
    bring the same names: what the late one begins or freezes then is nothing that anybody was told of.
    """
    names = 0 if call.healing else _NEW_NAMES.get(call.step, 0)
    return replace(call, args=(*(new_name() for _ in range(names)), *call.args[names:])) if names else call


MAX_JOINED_BYTES = 2**18
"""A larger step is a script call of its own: joining it would save nothing and hold the server longer."""

EXEC: tuple[Argument, ...] = ("EXEC",)


def commands(calls: Sequence[Call], dialect: Dialect, *, by_source: bool) -> list[tuple[Argument, ...]]:
    """What sends several calls of the same step: a script call, or a transaction around one."""
    (first, *others) = calls
    if first.step is Step.STAGE and first.nbytes > MAX_JOINED_BYTES and not (others or first.healing):
        return _staging(first, dialect)
    return [command(calls, dialect, by_source=by_source)]


def _staging(call: Call, dialect: Dialect) -> list[tuple[Argument, ...]]:
    """Stage a part without handing it to a script, which would get a copy of it and hand on another one.

    What is stored is first announced by the step, and put right behind it. Both by source: one script that is
    not known would let the rest of the transaction go on.
    """
    args: tuple[Any, ...] = call.args
    *others, name, part = args
    step = replace(call, args=(*others, name, b""))
    field = BLOCK + name
    return [
        ("MULTI",),
        command([step], dialect, by_source=True),
        ("HSETNX", call.key, field, part),
        ("EVAL", _staged(dialect), 1, call.key, field),
        EXEC,
    ]


@cache
def _staged(dialect: Dialect) -> bytes:
    return "\n".join([_first_line("staged", dialect, "allow-oom"), read_file("_staged")]).encode()


def command(calls: Sequence[Call], dialect: Dialect, *, by_source: bool) -> tuple[Argument, ...]:
    """One script call for several calls of the same step, each of which gets a reply of its own.

    EVALSHA, or EVAL with the whole source for a server that does not know the script yet.
    """
    step, healing = calls[0].step, calls[0].healing
    if not step.is_script:
        return (step.value[0], calls[0].key, *calls[0].args)
    words: list[Argument] = (
        ["EVAL", step.source(dialect, healing=healing)]
        if by_source
        else ["EVALSHA", step.sha1(dialect, healing=healing)]
    )
    words.append(len(calls))
    words.extend(call.key for call in calls)
    for call in calls:
        words.append(len(call.args))
        words.extend(call.args)
    return tuple(words)


def read_replies(raw: Any, count: int, run_id: str) -> list[Reply | ResponseError]:
    """Read what a script call of ``count`` entries was answered by the server with this run id.

    Raises:
        ValueError: the answer does not have the form that the scripts give.

    """
    if not isinstance(raw, list) or len(raw) != count:
        raise ValueError("not the replies of so many steps")
    return [_error(entry) or Reply.parse(entry, run_id) for entry in raw]


def _error(entry: Any) -> ResponseError | None:
    """What an entry was answered instead of a reply, if it was."""
    match entry:
        case [b"ERROR", bytes(text)]:
            return ResponseError(text.decode("utf-8", "replace"))
    return None


class Reply(NamedTuple):
    """What every step answers: an outcome, which attempt of the rollout there is, and the rest."""

    code: str
    incarnation: str
    seq: int
    version: int
    rest: tuple[Any, ...]
    run_id: str = ""
    """Run id of the server that answered."""

    @classmethod
    def parse(cls, raw: Any, run_id: str = "") -> Reply:
        """Read a raw reply of the server with this run id.

        Raises:
            ValueError: the reply does not have the form that the scripts give.

        """
        try:
            code, incarnation, seq, version, *rest = raw
            return cls(code.decode(), incarnation.decode(), int(seq), int(version), tuple(rest), run_id)
        except (TypeError, AttributeError):
            raise ValueError("not a reply of a step") from None

    @classmethod
    def of_value(cls, raw: Any, run_id: str) -> Reply:
        """Read what ``fetch`` was answered: ``rest`` holds the value, or None if the field is not there.

        Raises:
            ValueError: this is no value of one field.

        """
        if not isinstance(raw, bytes | memoryview | None):
            raise ValueError("not the value of a field")  # noqa: TRY004 - as of the other replies
        return cls("OK", "", 0, 0, (raw,), run_id)


class Row(NamedTuple):
    """What one step wrote, as read back: kind and call, value, and for a record the call's row."""

    field: bytes | None
    value: bytes | None
    call_row: bytes | None
    block_names: bytes
    """Names of the blocks that the step brought, or of its part, 16 bytes each."""
    blocks: Sequence[bytes | None]

    @property
    def missing_seq(self) -> int:
        """Number of the step of which nothing is there, if ``field`` is None."""
        return int(self.value or 0)

    def names(self) -> list[bytes]:
        """Names of the blocks, or of the part."""
        return [self.block_names[at : at + NAME_BYTES] for at in range(0, len(self.block_names), NAME_BYTES)]

    def named_blocks(self) -> list[tuple[bytes, bytes]]:
        """Names and values of the blocks; no bytes for one that is gone."""
        names = self.block_names
        return [
            (names[at : at + NAME_BYTES], value or b"")
            for at, value in zip(range(0, len(names), NAME_BYTES), self.blocks, strict=False)
        ]


@dataclass(frozen=True)
class Facts:
    """The counts that a frozen rollout must agree with."""

    records: int
    intents: int
    failures: int
    refusals: int
    blocks: int
    ids: int
    """Token ids of all prompts and generations, repeated prefixes included."""
    stored_bytes: int
    hash_fields: int

    def expected_hash_fields(self, seq: int) -> int:
        """How many fields the hash has if nothing was added or removed by another hand."""
        rows = 2 * self.records + self.intents + self.failures + self.refusals + self.blocks
        return 1 + seq + rows


@dataclass(frozen=True)
class Chunk:
    """Rows read in one step, and the step number to read on from."""

    next_seq: int
    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, next_seq: Any, rows: Sequence[Sequence[Any]]) -> Chunk:
        """Read the tail of a reply of ``freeze`` or ``read``."""
        return cls(int(next_seq), tuple(starmap(Row, rows)))

    def part_names(self) -> list[bytes]:
        """Names of the parts that were staged by its steps (``fetch``)."""
        return [name for row in self.rows if row.field == PART for name in row.names()]


@dataclass(frozen=True)
class Frozen:
    """A reply of ``freeze``: the fence holds, and the first chunk is here."""

    reply: Reply
    snapshot_id: str
    facts: Facts
    chunk: Chunk

    @classmethod
    def parse(cls, reply: Reply) -> Frozen:
        """Read the rest of ``reply``, whose code is OK."""
        snapshot_id, facts, next_seq, rows = reply.rest
        return cls(reply, snapshot_id.decode(), Facts(*map(int, facts)), Chunk.parse(next_seq, rows))


@dataclass(frozen=True)
class Index:
    """The calls that some steps recorded: name, and the beginning of the record (``codec.parse_head``).

    ``next_seq`` is the step to read on from now, ``resume_seq`` from where to look for more at a later time.
    """

    next_seq: int
    resume_seq: int
    records: tuple[tuple[bytes, bytes], ...]

    @classmethod
    def parse(cls, reply: Reply) -> Index:
        """Read the rest of a reply of ``index``, whose code is OK."""
        next_seq, resume_seq, records = reply.rest
        return cls(int(next_seq), int(resume_seq), tuple((call, head) for call, head in records))


@dataclass(frozen=True)
class LedgerPage:
    """What some steps wrote to a ledger, and the counts that it must agree with.

    ``rows`` are of the steps ``from_seq`` to ``next_seq - 1``: name of the field, and its value; None for
    what is not there.
    """

    from_seq: int
    next_seq: int
    rows: tuple[tuple[bytes | None, bytes | None], ...]
    records: int
    failures: int
    hash_fields: int

    @classmethod
    def parse(cls, reply: Reply, *, from_seq: int) -> LedgerPage:
        """Read the rest of a reply of ``rows``, whose code is OK."""
        next_seq, counts, rows = reply.rest
        read = tuple((field, value) for field, value in rows)
        return cls(from_seq, int(next_seq), read, *map(int, counts))


def stored_blocks(reply: Reply) -> dict[bytes, bytes]:
    """Names and values in a reply of ``blocks``."""
    (flat,) = reply.rest
    return dict(zip(flat[::2], flat[1::2], strict=True))


def join(key: bytes, *, new_incarnation: str) -> Call:
    """``lua/join.lua``."""
    return Call(Step.JOIN, key, (new_incarnation,))


def chain_ends(reply: Reply) -> list[bytes]:
    """Names of the newest chain ends in a reply of ``begin`` or ``join``; all before them is stored too."""
    (ends,) = reply.rest
    return [ends[at : at + NAME_BYTES] for at in range(0, len(ends), NAME_BYTES)]


def begin(key: bytes, model_call_id: str, *, new_incarnation: str) -> Call:
    """``lua/begin.lua``."""
    return Call(Step.BEGIN, key, (new_incarnation, model_call_id))


def put(key: bytes, encoded: EncodedRecord, *, incarnation: str, first_block: int) -> Call:
    """``lua/put.lua``, with the blocks from number ``first_block`` on."""
    sequence = encoded.sequence
    blocks = [part for name, value in sequence.blocks_from(first_block) for part in (BLOCK + name, value)]
    return Call(
        Step.PUT,
        key,
        (
            incarnation,
            encoded.model_call_id,
            RECORDED + encoded.seal,
            encoded.record,
            len(sequence.ids),
            sequence.parent(first_block),
            b"".join(name for name, _ in encoded.parts),
            b"".join(sequence.names[first_block:]),
            *blocks,
        ),
    )


def put_staged(
    key: bytes,
    model_call_id: str,
    *,
    seal: bytes,
    record: bytes,
    ids: int,
    part_names: Sequence[bytes],
    incarnation: str,
) -> Call:
    """``lua/put.lua``, for a record that has no blocks."""
    args = (incarnation, model_call_id, RECORDED + seal, record, ids, ROOT, b"".join(part_names), b"")
    return Call(Step.PUT, key, args)


def stage(key: bytes, name: bytes, part: bytes, *, incarnation: str) -> Call:
    """``lua/stage.lua``."""
    return Call(Step.STAGE, key, (incarnation, len(part), name, part))


def mark(
    key: bytes,
    model_call_id: str,
    *,
    new_incarnation: str,
    incarnation: str,
    mark_id: str,
    reason: Literal["marked", "lost"] = "marked",
) -> Call:
    """``lua/mark.lua``."""
    return Call(Step.MARK, key, (new_incarnation, incarnation, model_call_id, reason, mark_id))


def refuse(
    key: bytes, model_call_id: str, *, new_incarnation: str, incarnation: str, code: str, details: bytes
) -> Call:
    """``lua/refuse.lua``."""
    return Call(Step.REFUSE, key, (new_incarnation, incarnation, model_call_id, refusal_row(code), details))


def freeze(key: bytes, *, new_incarnation: str, new_snapshot_id: str, max_bytes: int) -> Call:
    """``lua/freeze.lua``."""
    return Call(Step.FREEZE, key, (new_incarnation, new_snapshot_id, max_bytes), reply_bytes=max_bytes)


def read(
    key: bytes, *, incarnation: str, snapshot_id: str, version: int, from_seq: int, max_bytes: int
) -> Call:
    """``lua/read.lua``."""
    args = (incarnation, snapshot_id, version, from_seq, max_bytes)
    return Call(Step.READ, key, args, reply_bytes=max_bytes)


def fetch(key: bytes, name: bytes) -> Call:
    """The part of this name, which says what is in it: whose attempt it is needs no asking."""
    return Call(Step.FETCH, key, (BLOCK + name,), reply_bytes=PART_BYTES)


def drop(key: bytes, *, snapshot_id: bytes, version: int, tombstone_ttl_s: int) -> Call:
    """``lua/drop.lua``."""
    return Call(Step.DROP, key, (snapshot_id, version, tombstone_ttl_s))


def peek(key: bytes) -> Call:
    """``lua/peek.lua``."""
    return Call(Step.PEEK, key, ())


def retire(key: bytes, *, incarnation: str, new_incarnation: str, tombstone_ttl_s: int) -> Call:
    """``lua/retire.lua``."""
    return Call(Step.RETIRE, key, (incarnation, new_incarnation, tombstone_ttl_s))


def delete(key: bytes, *, incarnation: str) -> Call:
    """``lua/delete.lua``."""
    return Call(Step.DELETE, key, (incarnation,))


def held(reply: Reply) -> bool:
    """Whether the attempt held anything, by a reply of ``peek``, ``retire`` or ``delete``.

    The first is asked before and is right where a later reply was lost; the others are asked in the step.
    """
    return reply.code == "OK" and bool(reply.rest[0])


def verify(
    key: bytes, *, new_incarnation: str, incarnation: str, seq: int, own_seq: int = 0, own_trace: bytes = b""
) -> Call:
    """``lua/verify.lua``."""
    return Call(Step.VERIFY, key, (new_incarnation, incarnation, seq, own_seq, own_trace))


def heal(call: Call, *, seq: int, incarnation: str, new_incarnation: str) -> Call:
    """``lua/_heal.lua``: put the step of ``call`` back, whose number was ``seq`` (0: not known)."""
    return replace(call, args=(seq, incarnation, new_incarnation, *call.args), healing=True)


def record(key: bytes, model_call_id: str, row: bytes, *, incarnation: str) -> Call:
    """``lua/record.lua``."""
    return Call(Step.RECORD, key, (incarnation, model_call_id, row))


def fail(key: bytes, model_call_id: str, reason: bytes, *, new_incarnation: str, incarnation: str) -> Call:
    """``lua/fail.lua``."""
    return Call(Step.FAIL, key, (new_incarnation, incarnation, model_call_id, reason))


def rows(key: bytes, *, incarnation: str, from_seq: int, max_bytes: int) -> Call:
    """``lua/rows.lua``."""
    return Call(Step.ROWS, key, (incarnation, from_seq, max_bytes), reply_bytes=max_bytes)


def index(key: bytes, *, incarnation: str, from_seq: int, max_bytes: int) -> Call:
    """``lua/index.lua``."""
    return Call(Step.INDEX, key, (incarnation, from_seq, max_bytes))


def blocks(key: bytes, *, incarnation: str, known: Sequence[bytes], ends: Sequence[bytes]) -> Call:
    """``lua/blocks.lua``."""
    return Call(Step.BLOCKS, key, (incarnation, b"".join(known), b"".join(ends)))


def fields(key: bytes, names: Sequence[bytes], *, incarnation: str, max_bytes: int, reply_bytes: int) -> Call:
    """``lua/fields.lua``; ``reply_bytes`` is what it is expected to bring."""
    return Call(Step.FIELDS, key, (incarnation, max_bytes, *names), reply_bytes=reply_bytes)
