"""From the rows of a frozen rollout to a snapshot, without I/O.

Nothing here guesses: what is missing, damaged or too much becomes a reason why the snapshot is
incomplete (design, "Reading").
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gym_capture_redis import codec
from gym_capture_redis.blocks import BlockTree
from gym_capture_redis.errors import CorruptRecordError
from gym_capture_redis.keys import ANNOUNCED, FAILURE, INTENT, PART, RECORD, RECORDED, REFUSAL, REFUSED
from gym_capture_redis.parts import Part, PartStore
from gym_capture_redis.protocols import IncompleteCode, IncompleteReason, Refusal, TokenCaptureSnapshot
from gym_capture_redis.scripts import Chunk, Frozen

_FAILURE_CODES = {
    b"marked": (IncompleteCode.MARKED, "reported as lost by its worker"),
    b"lost": (IncompleteCode.LOST_STEPS, "acknowledged, then lost by the server: noticed"),
    b"conflict": (IncompleteCode.CONFLICT, "reported in two ways that exclude each other"),
}

_KINDS = (RECORD, INTENT, FAILURE, REFUSAL)

_MOST_LOST_STEPS = 10_000
"""How many missing steps are looked past: a damaged number must come to an end."""


class SnapshotAssembly:
    """Takes the chunks of one frozen rollout in order, and ends as its snapshot."""

    def __init__(
        self, rollout_id: str, frozen: Frozen, entry_type: codec.EntryType, *, arrays: bool = False
    ) -> None:
        self._rollout_id = rollout_id
        self._frozen = frozen
        self._entry_type = entry_type
        self._arrays = arrays
        self._tree = BlockTree()
        self._parts = PartStore()
        self._parsed: dict[str, codec.ParsedRecord] = {}
        self._entries: dict[str, Any] = {}
        self._refusals: list[Refusal] = []
        self._reasons: list[IncompleteReason] = []
        self._seen = dict.fromkeys(_KINDS, 0)
        self._fields: set[bytes] = set()
        self._open_calls: list[str] = []
        self._corrupt_calls: set[str] = set()
        self._lost_steps: list[int] = []
        self._unusable_parts = 0

    @property
    def last_seq(self) -> int:
        """Number of the newest step there can be: each has a field, unless the server lost it."""
        return min(self._frozen.reply.seq, self._frozen.facts.hash_fields + _MOST_LOST_STEPS)

    def add(self, chunk: Chunk) -> None:
        """Take and check what one reply brought; the parts that it names come by ``add_part``."""
        for row in chunk.rows:
            field, value, call_row, block_names, _ = row
            if field is None:
                self._lost_steps.append(row.missing_seq)
            elif field != PART:
                if block_names:
                    self._tree.add_blocks(row.named_blocks())
                self._add_content(field, value, call_row)

    def add_part(self, name: bytes, content: Part | None) -> None:
        """Take and check a part; None for one that is gone."""
        if content is None:
            self._unusable_parts += 1
            return
        try:
            self._parts.add(name, content)
        except ValueError:
            self._unusable_parts += 1

    def finish(self) -> TokenCaptureSnapshot:
        """Build the entries, compare everything with the rollout's own counts, and close.

        Raises:
            UnsupportedFormatError: a record follows a newer schema.

        """
        self._build_entries()
        self._check_counts()
        failed = {reason.model_call_id for reason in self._reasons}
        for call in self._open_calls:
            if call not in failed:
                self._incomplete(IncompleteCode.LOST_CALL, call, "announced, but never recorded or refused")
        for call, entry in self._entries.items():
            parent = getattr(entry, "parent_call_id", None)
            if parent is not None and parent not in self._entries and parent not in self._corrupt_calls:
                self._incomplete(
                    IncompleteCode.MISSING_PARENT, call, f"its parent call {parent!r} is not here"
                )
        return TokenCaptureSnapshot(
            rollout_id=self._rollout_id,
            entries=tuple(self._entries.values()),
            incomplete=bool(self._reasons),
            snapshot_id=self._frozen.snapshot_id,
            version=self._frozen.reply.version,
            reasons=tuple(self._reasons),
            refusals=tuple(self._refusals),
            stored_bytes=self._frozen.facts.stored_bytes,
        )

    def _add_content(self, field: bytes, value: bytes | None, call_row: bytes | None) -> None:
        kind, call = _split(field)
        if kind is None or call is None:
            self._incomplete(IncompleteCode.TAMPERED, "", "the trace of a step is unreadable")
            return
        if field in self._fields:
            return  # a call may be marked several times, and an intent repeated
        if kind == INTENT and value != ANNOUNCED:
            return  # settled since; a row that is gone shows in the counts
        self._fields.add(field)
        if value is None:
            self._incomplete(IncompleteCode.TAMPERED, call, "what a step wrote is gone")
            return
        self._seen[kind] += 1
        match kind:
            case b"r:":
                self._add_record(call, value, call_row)
            case b"n:":
                self._open_calls.append(call)
            case b"f:":
                self._add_failure(call, value)
            case b"x:":
                self._add_refusal(call, value)

    def _add_record(self, call: str, record: bytes, call_row: bytes | None) -> None:
        if call_row is None or not call_row.startswith(RECORDED):
            self._incomplete(IncompleteCode.TAMPERED, call, "the call's row does not tell of its record")
            return
        try:
            seal = call_row.removeprefix(RECORDED)
            parsed = codec.parse(record, seal, rollout_id=self._rollout_id, model_call_id=call)
        except CorruptRecordError as error:
            self._corrupt(call, error)
        else:
            self._parsed[call] = parsed
            self._tree.add_tail(parsed.end, parsed.tail)

    def _build_entries(self) -> None:
        tree, parts, arrays = self._tree, self._parts, self._arrays
        for call, parsed in self._parsed.items():
            try:
                self._entries[call] = codec.build(parsed, tree, parts, self._entry_type, arrays=arrays)
            except CorruptRecordError as error:
                self._corrupt(call, error)
        for call, entry in self._entries.items():
            codec.give_tokens(entry, self._parsed[call], tree, arrays=arrays)

    def _corrupt(self, call: str, error: CorruptRecordError) -> None:
        self._corrupt_calls.add(call)
        self._incomplete(IncompleteCode.CORRUPT, call, str(error))

    def _add_failure(self, call: str, value: bytes) -> None:
        when, _, rest = value.partition(b" ")
        reason, _, _mark_ids = rest.partition(b" ")
        code, text = _FAILURE_CODES.get(reason, (IncompleteCode.TAMPERED, "an unreadable failure"))
        self._incomplete(code, call, f"{text} {_at(when)}".rstrip())

    def _add_refusal(self, call: str, value: bytes) -> None:
        code, _, stored = value.removeprefix(REFUSED).partition(b"\0")
        try:
            text = code.decode("utf-8")
            details = codec.decode_refusal(self._rollout_id, call, text, stored)
        except (CorruptRecordError, UnicodeDecodeError):
            self._incomplete(IncompleteCode.CORRUPT, call, "the stored refusal is damaged")
        else:
            self._refusals.append(Refusal(call, text, details))

    def _check_counts(self) -> None:
        facts = self._frozen.facts
        expected = facts.expected_hash_fields(self._frozen.reply.seq) - len(self._lost_steps)
        if self._lost_steps:
            numbers = _ranges(self._lost_steps)
            self._incomplete(IncompleteCode.LOST_STEPS, "", f"the server lost its steps {numbers}")
        if facts.hash_fields != expected:
            self._tampered(f"the hash has {facts.hash_fields} fields instead of {expected}")
        wanted = {
            RECORD: facts.records,
            INTENT: facts.intents,
            FAILURE: facts.failures,
            REFUSAL: facts.refusals,
        }
        unusable = self._unusable_parts + self._tree.unusable
        if unusable:
            self._tampered(f"{unusable} token blocks or parts are missing, damaged or cut off")
        blocks = len(self._tree) + len(self._parts)
        if blocks != facts.blocks:
            self._tampered(f"{blocks} token blocks and parts were found instead of {facts.blocks}")
        ids = sum(parsed.prompt_length + len(parsed.log_probs) for parsed in self._parsed.values())
        if ids != facts.ids and not self._corrupt_calls:
            self._tampered(f"the records have {ids} token ids instead of {facts.ids}")
        for kind, count in wanted.items():
            if self._seen[kind] != count:
                name = kind.decode()
                self._tampered(f"{self._seen[kind]} fields {name}… were found instead of {count}")

    def _tampered(self, detail: str) -> None:
        self._incomplete(IncompleteCode.TAMPERED, "", detail)

    def _incomplete(self, code: IncompleteCode, call: str, detail: str) -> None:
        self._reasons.append(IncompleteReason(code, call, detail))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short, with ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == number - 1 else number
        ranges.append((first, number))
    return ", ".join(f"{first}–{last}" if last > first else str(first) for first, last in ranges)  # noqa: RUF001


def _split(field: bytes) -> tuple[bytes, str] | tuple[None, None]:
    kind = field[:2]
    try:
        return (kind, field[2:].decode("utf-8")) if kind in _KINDS else (None, None)
    except UnicodeDecodeError:
        return None, None


def _at(unix_ms: bytes) -> str:
    try:
        moment = datetime.fromtimestamp(int(unix_ms) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return ""
    return f"at {moment.isoformat(timespec='milliseconds')}"
