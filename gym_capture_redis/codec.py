"""A record as bytes, and back: pure functions, exact in both directions (docs/wire-format.md).

A record holds the small fields, the end of its token blocks, and the packed arrays. The digest covers the
content, not how a caller happened to carry it: lists and arrays, Gym's entry class and ours give the same
one. Nothing here decodes by executing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, cast

import msgpack
from pydantic import ValidationError
from xxhash import xxh3_128_digest

from gym_capture_redis.blocks import NAME_BYTES, BlockTree, TokenSequence, cut
from gym_capture_redis.errors import (
    CorruptRecordError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedFormatError,
)
from gym_capture_redis.experts import PLAIN, in_one, pack_experts, unpack_experts
from gym_capture_redis.packing import (
    Array,
    Packed,
    check_integers,
    joined_ids,
    pack_log_probs,
    unpack_log_probs,
)
from gym_capture_redis.parts import PartStore, named
from gym_capture_redis.plain_words import broken_rule
from gym_capture_redis.records import SCHEMA_VERSION
from gym_capture_redis.small_fields import OMITTED_VALUES, canonical_json, omitted_by
from gym_capture_redis.taking import EMPTY_ARRAYS, TakenEntry, name_of, reason_of, take

RECORD_FORMAT = 1
DIGEST_BYTES = 32
_HEAD_PAIRS = 5
"""Of a record: those before the log probabilities."""

MAX_DETAILS_BYTES = 65_536
"""Limit of a refusal's details."""

_UNREADABLE = (ValueError, TypeError, LookupError, OverflowError, RecursionError, msgpack.UnpackException)


class EntryType(Protocol):
    """A class of entries: Gym's ``TokenEntry`` or ours."""

    def model_validate(self, obj: Any) -> Any:
        """Build one entry from a mapping of its fields."""


class EncodedRecord(NamedTuple):
    """A record ready to send: ``record`` is msgpack, ``sequence`` its blocks.

    ``parts`` are names and contents of what is too long to be in the record. ``seal`` has 48 bytes: a
    digest of the content, by which a repeated put is known, and a check of the stored bytes, which is quicker
    to compute again.
    """

    rollout_id: str
    model_call_id: str
    seal: bytes
    record: bytes
    sequence: TokenSequence
    parts: list[tuple[bytes, bytes]]


class RecordHead(NamedTuple):
    """What a stored record begins with: all but log probabilities and experts. No seal vouches for it."""

    small_fields: dict[str, Any]
    end: bytes
    tail: Packed
    prompt_length: int


class ParsedRecord(NamedTuple):
    """A stored record that matches its seal, before its tokens are taken from the blocks."""

    rollout_id: str
    model_call_id: str
    small_fields: dict[str, Any]
    end: bytes
    tail: Packed
    prompt_length: int
    log_probs: Array
    experts: list[Any] | None


class _Content(NamedTuple):
    """What a record consists of, and what its digest covers. ``fields`` are the small ones that it stores."""

    fields: dict[str, Any]
    end: bytes
    tail: Packed
    prompt_length: int
    log_probs: Packed
    experts: list[Any] | None

    def packed(self) -> bytes:
        record: bytes = msgpack.packb(
            {
                "v": RECORD_FORMAT,
                "e": self.fields,
                "c": self.end,
                "t": [self.tail.type, self.tail.raw],
                "p": self.prompt_length,
                "l": [self.log_probs.type, self.log_probs.raw],
                "x": self.experts,
            }
        )
        return record

    def digest(self, rollout_id: str, model_call_id: str) -> bytes:
        """BLAKE2b over a head with all lengths, sorted JSON of the small fields, then each packed array."""
        *experts_head, experts_body = [b""] if self.experts is None else self.experts
        if experts_head and experts_head[0] == PLAIN:
            experts_body = canonical_json(experts_body)
        elif isinstance(experts_body, list):
            experts_body = b"".join(experts_body)
        parts = [canonical_json(self.fields), self.end, self.tail.raw, self.log_probs.raw, experts_body]
        head = [
            rollout_id,
            model_call_id,
            self.tail.type,
            self.prompt_length,
            self.log_probs.type,
            experts_head,
            list(map(len, parts)),
        ]
        return hashlib.blake2b(b"".join([msgpack.packb(head), *parts]), digest_size=DIGEST_BYTES).digest()


def encode(entry: Any, *, max_record_bytes: int, earlier: Iterable[TokenSequence] = ()) -> EncodedRecord:
    """Take and encode an entry; see ``take`` and ``encode_taken``."""
    return encode_taken(take(entry), max_record_bytes=max_record_bytes, earlier=earlier)


def encode_taken(
    entry: TakenEntry, *, max_record_bytes: int, earlier: Iterable[TokenSequence] = ()
) -> EncodedRecord:
    """Encode the content of an entry, checking its arrays.

    ``earlier`` sequences of the same rollout make it faster; the result is the same without them.

    Raises:
        InvalidRecordError: the entry breaks a rule, or holds what no reader could load unchanged.
        RecordTooLargeError: record and tokens together exceed ``max_record_bytes``.

    """
    rollout_id, model_call_id = entry.subject()
    subject = {"rollout_id": rollout_id, "model_call_id": model_call_id}
    try:
        ids, prompt_length = joined_ids(entry.prompt_token_ids, entry.generation_token_ids)
        log_probs = pack_log_probs(entry.generation_log_probs)
        _check_lengths(len(ids) - prompt_length, log_probs)
        sequence = cut(ids, earlier)
        experts, parts = _taken_apart(pack_experts(entry.routed_experts))
        content = _Content(entry.small_fields, sequence.end, sequence.tail, prompt_length, log_probs, experts)
        record = content.packed()
        seal = sealed(rollout_id, model_call_id, content.digest(rollout_id, model_call_id), record)
    except InvalidRecordError as error:
        raise type(error)(f"{error} ({name_of(subject)})", **subject) from None
    except (ValueError, TypeError, OverflowError, RuntimeError, LookupError) as error:
        raise InvalidRecordError(
            f"the record cannot be encoded: {reason_of(error)} ({name_of(subject)})", **subject
        ) from None
    nbytes = len(record) + sequence.ids.nbytes + sum(len(part) for _, part in parts)
    if nbytes > max_record_bytes:
        raise RecordTooLargeError(
            f"the record has {nbytes} bytes, the limit max_record_bytes is {max_record_bytes} "
            f"({name_of(subject)})",
            **subject,
        )
    return EncodedRecord(rollout_id, model_call_id, seal, record, sequence, parts)


def parse(record: bytes, seal: bytes, *, rollout_id: str, model_call_id: str) -> ParsedRecord:
    """Read a stored record and check it against its seal.

    Raises:
        CorruptRecordError: the bytes are not those that were stored for this call.

    """
    if sealed(rollout_id, model_call_id, seal[:DIGEST_BYTES], record) != seal:
        raise _corrupt("the stored record does not match its digest", rollout_id, model_call_id)
    try:
        # The digest is taken over JSON, in which the keys nil and "null" are the same: strings only.
        fields = msgpack.unpackb(record, strict_map_key=True)
        _check_format(fields)
        tail, log_probs = Packed(*fields["t"]), unpack_log_probs(*fields["l"])
        check_integers(tail)
        return ParsedRecord(
            rollout_id, model_call_id, fields["e"], fields["c"], tail, fields["p"], log_probs, fields["x"]
        )
    except _UNREADABLE:
        raise _corrupt("the stored record is damaged", rollout_id, model_call_id) from None


def parse_head(head: bytes, *, rollout_id: str, model_call_id: str) -> RecordHead:
    """Read a stored record, or what it begins with up to its fifth pair.

    Raises:
        CorruptRecordError: the bytes are no beginning of a record.
        UnsupportedFormatError: the record follows a newer schema.

    """
    about = {"rollout_id": rollout_id, "model_call_id": model_call_id}
    try:
        stream = msgpack.Unpacker(strict_map_key=True, max_buffer_size=0)
        stream.feed(head)
        pairs = range(min(stream.read_map_header(), _HEAD_PAIRS))
        fields = {stream.unpack(): stream.unpack() for _ in pairs}
        _check_format(fields)
        tail = Packed(*fields["t"])
        check_integers(tail)
        small_fields = OMITTED_VALUES | fields["e"]
        is_newer = small_fields["schema_version"] > SCHEMA_VERSION
    except _UNREADABLE:
        raise CorruptRecordError(f"the stored record is damaged ({name_of(about)})", **about) from None
    if is_newer:
        raise _newer_schema(small_fields, about)
    return RecordHead(small_fields, fields["c"], tail, fields["p"])


def build(
    parsed: ParsedRecord, tree: BlockTree, parts: PartStore, entry_type: EntryType, *, arrays: bool = False
) -> Any:
    """Make the entry of a parsed record, once all blocks are in ``tree`` and all parts in ``parts``.

    It is complete after ``give_tokens``. With ``arrays`` nested experts are an array.

    Raises:
        CorruptRecordError: a block or part that the record needs is missing.
        UnsupportedFormatError: the record follows a newer schema than ``entry_type`` reads.

    """
    rollout_id, model_call_id, fields, end, tail, prompt_length, log_probs, experts = parsed
    about = {"rollout_id": rollout_id, "model_call_id": model_call_id}
    try:
        if prompt_length < 0 or prompt_length + len(log_probs) != tree.length(end, tail):
            raise ValueError("arrays of different lengths")
        if experts is not None:
            experts = unpack_experts(_put_together(experts, parts), arrays=arrays)
    except _UNREADABLE:
        raise CorruptRecordError(
            f"token blocks or parts of the record are missing or do not fit it ({name_of(about)})", **about
        ) from None
    entry = _validated(entry_type, fields, about)
    entry.__dict__["routed_experts"] = experts
    return entry


def give_tokens(entry: Any, parsed: ParsedRecord, tree: BlockTree, *, arrays: bool = False) -> None:
    """Put the tokens into an entry that was built: lists, or with ``arrays`` numpy arrays.

    Ids are int32, or int64 where needed, as views of one buffer; log probabilities float32 where exact, else
    float64. Do it after all entries of a rollout are built: while long lists are new, whatever else is made
    lets the garbage collector look through all of them again.
    """
    # The digest vouches for the arrays; validating every element again would cost more than reading.
    fields = entry.__dict__
    fields["prompt_token_ids"], fields["generation_token_ids"] = tree.split(
        parsed.end, parsed.tail, parsed.prompt_length, arrays=arrays
    )
    fields["generation_log_probs"] = parsed.log_probs if arrays else parsed.log_probs.tolist()


def _taken_apart(experts: list[Any] | None) -> tuple[list[Any] | None, list[tuple[bytes, bytes]]]:
    """The experts with names of parts in place of a body that has several, and these parts."""
    if experts is None or experts[0] == PLAIN or len(experts[-1]) <= 1:
        return in_one(experts), []
    parts = named(experts[-1])
    return [*experts[:-1], [name for name, _ in parts]], parts


def _put_together(experts: list[Any] | None, parts: PartStore) -> list[Any] | None:
    """The experts with their body, however they were stored."""
    if experts is None or experts[0] == PLAIN or not isinstance(experts[-1], list):
        return experts
    return [*experts[:-1], parts.of(experts[-1])]


def sealed(rollout_id: str, model_call_id: str, digest: bytes, record: bytes) -> bytes:
    """The digest of a content, and the check of the bytes that are stored of it."""
    name: bytes = msgpack.packb((rollout_id, model_call_id))
    return digest + xxh3_128_digest(b"".join((name, digest, record)))


def encode_refusal(rollout_id: str, model_call_id: str, code: str, details: dict[str, Any]) -> bytes:
    """What a refusal's row holds after its code: a digest of 32 bytes, then msgpack of the details.

    Raises:
        InvalidRecordError: a detail that msgpack cannot carry.

    """
    try:
        packed: bytes = msgpack.packb(details)
        stored = _refusal_digest(rollout_id, model_call_id, code, packed) + packed
        decode_refusal(rollout_id, model_call_id, code, stored)  # what no reader could load ends here
    except (CorruptRecordError, *_UNREADABLE) as error:
        problem = f"cannot be encoded: {reason_of(error)}"
    else:
        if len(packed) <= MAX_DETAILS_BYTES:
            return stored
        problem = f"have {len(packed)} bytes, more than {MAX_DETAILS_BYTES}"
    raise InvalidRecordError(
        f"the details of the refusal {problem}", rollout_id=rollout_id, model_call_id=model_call_id
    )


def decode_refusal(rollout_id: str, model_call_id: str, code: str, stored: bytes) -> dict[str, Any]:
    """Details of a refusal from what ``encode_refusal`` gave.

    Raises:
        CorruptRecordError: the bytes are not those that were stored for this call and code.

    """
    digest, packed = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    try:
        details = msgpack.unpackb(packed, strict_map_key=True)
        intact = _refusal_digest(rollout_id, model_call_id, code, packed) == digest
    except _UNREADABLE:
        intact = False
    if not intact or not isinstance(details, dict):
        raise CorruptRecordError(
            f"the stored refusal of call {model_call_id!r} of rollout {rollout_id} is damaged",
            rollout_id=rollout_id,
            model_call_id=model_call_id,
        )
    return details


def _refusal_digest(rollout_id: str, model_call_id: str, code: str, packed: bytes) -> bytes:
    head = canonical_json([rollout_id, model_call_id, code])
    return hashlib.blake2b(head + packed, digest_size=DIGEST_BYTES).digest()


def _corrupt(what: str, rollout_id: str, model_call_id: str) -> CorruptRecordError:
    about = {"rollout_id": rollout_id, "model_call_id": model_call_id}
    return CorruptRecordError(f"{what} ({name_of(about)})", **about)


def _check_format(fields: dict[str, Any]) -> None:
    if (
        fields["v"] != RECORD_FORMAT
        or len(fields["c"]) != NAME_BYTES
        or type(fields["e"]) is not dict
        or type(fields["p"]) is not int
    ):
        raise ValueError("not a record of this format")


def _newer_schema(fields: dict[str, Any], about: dict[str, str]) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"the record has schema_version {fields['schema_version']}, newer than this reader's: "
        f"upgrade the reader ({name_of(about)})",
        **about,
    )


def _check_lengths(generated: int, log_probs: Packed) -> None:
    scored = log_probs.length
    if generated != scored:
        raise InvalidRecordError(
            f"the record is invalid: {generated} generation_token_ids but {scored} generation_log_probs"
        )


def _validated(entry_type: EntryType, fields: dict[str, Any], about: dict[str, str]) -> Any:
    try:
        complete = {**omitted_by(cast("Hashable", entry_type)), **fields, **about, **EMPTY_ARRAYS}
        if complete.get("output_items") == []:
            complete["output_items"] = []  # one of its own: a class that declares less may keep it
        return entry_type.model_validate(complete)
    except ValidationError as error:
        if fields.get("schema_version", 0) > SCHEMA_VERSION:
            raise _newer_schema(fields, about) from None
        raise CorruptRecordError(
            f"the stored record is intact but not valid: {broken_rule(error)} ({name_of(about)})", **about
        ) from None
