"""``RedisLineageStore``: which recorded call a request goes on from (contract, section 6).

Gym matches; this module brings it the calls of a rollout, and the tokens of the one that matched. Its hooks
are synchronous and run on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gym_capture_redis import gym_compat, scripts
from gym_capture_redis.block_cache import BlockCache
from gym_capture_redis.blocks import ROOT, TokenSequence, joined
from gym_capture_redis.codec import RecordHead, parse_head
from gym_capture_redis.endpoint import raise_refusal
from gym_capture_redis.errors import CorruptRecordError
from gym_capture_redis.gym.neighbours import Neighbours
from gym_capture_redis.keys import rollout_key, validate_rollout_id
from gym_capture_redis.marks import Target
from gym_capture_redis.packing import Packed
from gym_capture_redis.process_bound import ProcessBound
from gym_capture_redis.settings import LineageSettings
from gym_capture_redis.subject import Subject
from gym_capture_redis.sync_client import SyncClient
from gym_capture_redis.taking import EMPTY_ARRAYS

_Base: Any = gym_compat.required_attribute("lineage", "IncrementalLineageStore")
_TokenEntry: Any = gym_compat.required_attribute("records", "TokenEntry")

_BLANK: Any = _TokenEntry.model_construct(**EMPTY_ARRAYS)
"""Copied for each call: to construct one takes ten times as long, for the defaults that are filled in."""

_LOOKED_AT_BYTES = 8 * 2**20
"""Of records in one step: much less is sent, but the server does nothing else meanwhile."""


class _Cursor(NamedTuple):
    """How far a rollout was read: of which attempt, and from which server process."""

    incarnation: str
    run_id: str
    next_seq: int


class _Ref(NamedTuple):
    """Where the tokens of a call are."""

    incarnation: str
    model_call_id: str
    prompt_is_delta: bool
    end: bytes
    tail: Packed
    prompt_length: int


class _Kept(NamedTuple):
    """The ids of a call as Python integers, and the last full block that they begin with."""

    end: bytes
    ids: tuple[int, ...]

    def listed(self, sequence: TokenSequence) -> list[int]:
        """The ids of a sequence; what both begin with is not made anew, which takes longer than all else."""
        shared = sequence.length_up_to(self.end)
        listed = list(self.ids) if shared else []
        listed[shared:] = sequence.ids[shared:].tolist()
        return listed


_NOTHING_KEPT = _Kept(ROOT, ())


class RedisLineageStore(ProcessBound, _Base):  # type: ignore[misc]
    """Finds the parents of requests among the records that the sinks of the same namespace have put.

    What any process has put is seen by all others as soon as its ``put`` has returned. Constructing it does
    no I/O; one object serves any number of threads. To resolve takes one read or two, each of which ends
    within ``timeout_s``; where one fails, Gym records the call as unresolved.

    Args:
        url: as of the sink; None reads ``GYM_CAPTURE_REDIS_URL``, else ``redis://127.0.0.1:6379/0``.
        namespace: the one that the sinks of this run use.
        settings: the fields of ``LineageSettings``.

    Raises:
        ConfigurationError: an unknown setting, by name, or a malformed value.
        InvalidIdentifierError: a malformed namespace.

    """

    def __init__(self, url: str | None = None, *, namespace: str = "default", **settings: Any) -> None:
        self._settings = LineageSettings.build(url, namespace, settings)
        super().__init__(
            max_cached_rollouts=self._settings.max_cached_rollouts,
            max_cached_tokens=self._settings.max_cached_tokens,
        )
        self._client = SyncClient(self._settings)
        self._prefixes = BlockCache(self._settings.prefix_cache_bytes)
        self._neighbours = Neighbours(self)

    def is_process_shared(self) -> bool:
        """Whether separate workers see each other's records: yes."""
        return True

    async def close(self) -> None:
        """Forget what was read, and close the connections that are free. Idempotent."""
        await super().close()
        await self._client.close_in_loop()

    def __repr__(self) -> str:
        """Class, server and namespace, without credentials."""
        return f"{type(self).__name__}({str(self._settings.url)!r}, namespace={self._settings.namespace!r})"

    def _fetch_new_entries(
        self, rollout_id: str, cursor: _Cursor | None
    ) -> tuple[list[tuple[Any, _Ref]], _Cursor | None]:
        """Calls recorded since ``cursor``, without their tokens.

        Raises:
            CursorReset: the attempt is over, or another server answers, which may have forgotten some.

        """
        self._neighbours.should_write_to(Target.of(self._settings))
        deadline = self._client.deadline()
        if cursor is None and rollout_id in getattr(self, "_materialized", ()):
            # What Gym kept of an attempt's tokens is not for calls of the same names in the next.
            self._remember_materialized(rollout_id, "", ())
        incarnation, run_id, next_seq = cursor or _Cursor("", "", 1)
        items: list[tuple[Any, _Ref]] = []
        holes: list[int] = []
        while True:
            call = scripts.index(
                self._key(rollout_id),
                incarnation=incarnation,
                from_seq=next_seq,
                max_bytes=_LOOKED_AT_BYTES,
            )
            reply = self._client.run(call, Subject(rollout_id), deadline=deadline)
            if not incarnation and reply.code != "OK":
                return [], None
            if reply.code != "OK" or run_id not in ("", reply.run_id) or reply.seq < next_seq - 1:
                raise _Base.CursorReset
            incarnation, run_id = reply.incarnation, reply.run_id
            index = scripts.Index.parse(reply)
            items += [_item(rollout_id, incarnation, *record) for record in index.records]
            if index.resume_seq < index.next_seq:
                holes.append(index.resume_seq)
            next_seq = index.next_seq
            if next_seq > reply.seq:
                return items, _Cursor(incarnation, run_id, min(holes, default=next_seq))

    def _load_entry(self, rollout_id: str, ref: _Ref) -> Any:
        """Load the tokens of one call."""
        (entry,) = self._load_entries(rollout_id, [ref])
        return entry

    def _load_entries(self, rollout_id: str, refs: list[_Ref]) -> list[Any]:
        """Load the tokens of calls, in one round trip, or in none where all are known here already.

        Raises:
            TokenCaptureRetiredError: the attempt was retired or deleted meanwhile.
            CorruptRecordError: tokens are missing or damaged.

        """
        known = self._prefixes.sequences(rollout_id)
        blocks = self._missing_blocks(rollout_id, refs, known)
        sequences = [_sequence(rollout_id, ref, blocks, known) for ref in refs]
        for ref, sequence in zip(refs, sequences, strict=True):
            if not ref.prompt_is_delta:
                self._prefixes.remember(rollout_id, ref.incarnation, sequence)
        kept = self._kept(rollout_id)
        return [_entry(rollout_id, *one, kept) for one in zip(refs, sequences, strict=True)]

    def _kept(self, rollout_id: str) -> _Kept:
        """What Gym keeps of the newest parent: most others begin with it."""
        try:
            call_id, ids = self._cached_materialized(rollout_id)
            _, refs, _ = self._cache[rollout_id]
            ref = refs[call_id]
        except (LookupError, TypeError, ValueError, AttributeError):
            return _NOTHING_KEPT  # nothing is there; or Gym, whose own it is, keeps it in another way
        # The blocks of a delta are those of its suffix alone.
        return _NOTHING_KEPT if ref.prompt_is_delta else _Kept(ref.end, ids)

    def _missing_blocks(
        self, rollout_id: str, refs: Sequence[_Ref], known: Sequence[TokenSequence]
    ) -> dict[bytes, bytes]:
        here = {ROOT}.union(*(sequence.names for sequence in known))
        ends = [ref.end for ref in refs if ref.end not in here]
        if not ends:
            return {}
        call = scripts.blocks(
            self._key(rollout_id), incarnation=refs[0].incarnation, known=[*_landmarks(known)], ends=ends
        )
        subject = Subject(rollout_id)
        reply = self._client.run(call, subject, deadline=self._client.deadline())
        if reply.code != "OK":
            raise_refusal(reply, subject)
        return scripts.stored_blocks(reply)

    def _key(self, rollout_id: str) -> bytes:
        return rollout_key(self._settings.namespace, validate_rollout_id(rollout_id))


def _item(rollout_id: str, incarnation: str, call: bytes, stored: bytes) -> tuple[Any, _Ref]:
    """What Gym needs to know of a call, in its own class of entries, and where its tokens are."""
    model_call_id = call.decode("utf-8", "replace")
    head = parse_head(stored, rollout_id=rollout_id, model_call_id=model_call_id)
    fields = head.small_fields
    entry = _BLANK.model_copy(
        update=fields
        | EMPTY_ARRAYS
        | {"rollout_id": rollout_id, "model_call_id": model_call_id, "cum_len": fields["cum_len"] or 0}
    )
    return entry, _ref(incarnation, model_call_id, head)


def _ref(incarnation: str, model_call_id: str, head: RecordHead) -> _Ref:
    is_delta = bool(head.small_fields["prompt_is_delta"])
    return _Ref(incarnation, model_call_id, is_delta, head.end, head.tail, head.prompt_length)


def _sequence(
    rollout_id: str, ref: _Ref, blocks: dict[bytes, bytes], known: Sequence[TokenSequence]
) -> TokenSequence:
    try:
        return joined(ref.end, ref.tail, blocks, known)
    except ValueError:
        raise CorruptRecordError(
            f"token blocks of the record are missing or damaged (call {ref.model_call_id!r} of rollout "
            f"{rollout_id})",
            rollout_id=rollout_id,
            model_call_id=ref.model_call_id,
        ) from None


def _entry(rollout_id: str, ref: _Ref, sequence: TokenSequence, kept: _Kept) -> Any:
    """The tokens of a call, in Gym's class of entries; its digest is compared there."""
    prompt = kept.listed(sequence)
    generation = prompt[ref.prompt_length :]
    del prompt[ref.prompt_length :]
    return _BLANK.model_copy(
        update={
            "rollout_id": rollout_id,
            "model_call_id": ref.model_call_id,
            "prompt_token_ids": prompt,
            "generation_token_ids": generation,
            "generation_log_probs": [],
            "prompt_is_delta": ref.prompt_is_delta,
        }
    )


def _landmarks(known: Sequence[TokenSequence]) -> Iterator[bytes]:
    """Some blocks of each sequence, the denser the nearer to its end, where most calls go on from it."""
    for sequence in known:
        distance = 1
        while distance <= len(sequence.names):
            yield sequence.names[-distance]
            distance *= 2
