"""``RedisStagingSink`` and ``RedisStagingSource``: calls that inference workers stage (contract, section 6).

Synchronous, for any number of threads. Steps of threads that wait at the same time share round trips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from gym_capture_redis import scripts
from gym_capture_redis.attachments import unpack_attachments, unpack_extras
from gym_capture_redis.block_cache import BlockCache
from gym_capture_redis.endpoint import raise_refusal
from gym_capture_redis.errors import (
    CallConflictError,
    CorruptRecordError,
    InvalidIdentifierError,
    StagedCallMissingError,
)
from gym_capture_redis.gym.chain_cache import ChainCache, Link
from gym_capture_redis.gym.staged_codec import EncodedCall, StagedCall, decode, encode, of_gym
from gym_capture_redis.keys import (
    BLOCK,
    CALL_ROW,
    RECORD,
    distinct,
    new_name,
    staged_key,
    validate_call_id,
    validate_rollout_id,
)
from gym_capture_redis.parts import PART_BYTES, PartStore
from gym_capture_redis.process_bound import ProcessBound
from gym_capture_redis.scripts import Call, Reply
from gym_capture_redis.settings import ServerSettings, StagingSinkSettings, StagingSourceSettings
from gym_capture_redis.subject import Subject
from gym_capture_redis.sync_client import SyncClient

_StageResult = of_gym("records", "StageResult")
_staging_key = of_gym("records", "staging_key")
_compute_chain_hash = of_gym("digest", "compute_chain_hash")
_compute_extras_digest = of_gym("digest", "compute_extras_digest")

_TRIP_BYTES = 4 * 2**20
"""Of parts in one round trip."""

_FIELDS_AT_ONCE = 1_000
_RECORDS_REPLY_BYTES = 2**16
"""What a read of records is expected to bring: few are large."""

_ROLLOUTS_AT_ONCE = 16

T = TypeVar("T")
SettingsT = TypeVar("SettingsT", bound=ServerSettings)


class _Staging(ProcessBound, Generic[SettingsT]):
    """What sink and source share. Opens nothing until it is used."""

    def __init__(self, settings: SettingsT) -> None:
        self._settings = settings
        self._client = SyncClient(settings)

    def close(self) -> None:
        """Close the connections that no thread uses, and the others once they are free. Idempotent.

        Nothing acknowledged is ever pending. A later call opens new connections.
        """
        self._client.close()

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def __repr__(self) -> str:
        """Class, server and namespace, without credentials."""
        return f"{type(self).__name__}({str(self._settings.url)!r}, namespace={self._settings.namespace!r})"

    def _key(self, rollout_id: str) -> bytes:
        return staged_key(self._settings.namespace, rollout_id)


class RedisStagingSink(_Staging[StagingSinkSettings]):
    """Stages the calls of inference workers, from any number of threads, processes and machines.

    Constructing it does no I/O. Every call ends within ``timeout_s``, retries included.

    Args:
        url: as of the token sink; None reads ``GYM_CAPTURE_REDIS_URL``, else ``redis://127.0.0.1:6379/0``.
        namespace: separates runs, whose rollout ids are the same.
        settings: the fields of ``StagingSinkSettings``.

    Raises:
        ConfigurationError: an unknown setting, by name, or a malformed value.
        InvalidIdentifierError: a malformed namespace.

    """

    def __init__(self, url: str | None = None, *, namespace: str = "default", **settings: Any) -> None:
        super().__init__(StagingSinkSettings.build(url, namespace, settings))
        self._stored = BlockCache(self._settings.part_cache_bytes)

    def stage(self, record: Any, *, attachments: Mapping[str, Any] | None = None) -> Any:
        """Store a ``StagedCallRecord`` with its attachments; on return all is durable and visible, at once.

        Attachments are bytes, numpy arrays, lists and plain values in mappings with strings as names. Staging
        the same again does nothing. Returns a ``StageResult`` that is ``ok``, with the key, which is always
        ``<rollout id>/<model call id>``. What is refused is raised, and nothing of it can be read.

        Raises:
            InvalidIdentifierError, InvalidRecordError, RecordTooLargeError: refused before the network.
            CallConflictError: other content was staged for the call; it stays as it is.
            TokenCaptureRetiredError: the rollout was retired.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        deadline = self._client.deadline()
        subject, encoded = encode(record, attachments, max_record_bytes=self._settings.max_record_bytes)
        reply = self._put(subject, encoded, deadline)
        if reply.code == "CONFLICT":
            raise CallConflictError(
                f"the call was staged before, with other content, which stays ({subject})",
                rollout_id=subject.rollout_id,
                model_call_id=subject.model_call_id,
            )
        if reply.code not in ("OK", "SAME"):
            raise_refusal(reply, subject)
        return _StageResult(ok=True, staging_key=_staging_key(subject.rollout_id, subject.model_call_id))

    def _put(self, subject: Subject, encoded: EncodedCall, deadline: float) -> Reply:
        """Send the parts that are not known to be stored and then the record, until it finds all it needs."""
        rollout_id = subject.rollout_id
        incarnation, joined = self._stored.incarnation(rollout_id), False
        while True:
            if not incarnation:
                incarnation, joined = self._join(subject, deadline), True
            unknown = self._stored.unknown(rollout_id, incarnation, encoded.parts)
            reply = self._send(self._steps(subject, encoded, unknown, incarnation), subject, deadline)
            if reply.code == "RETIRED" and not joined:
                incarnation = ""  # that attempt is over, and another one may have begun
            elif reply.code == "MISSING":
                self._stored.forget(rollout_id)
            else:
                break
        if reply.code in ("OK", "SAME"):
            self._stored.learn(rollout_id, incarnation, [name for name, _ in encoded.parts])
        return reply

    def _join(self, subject: Subject, deadline: float) -> str:
        call = scripts.join(self._key(subject.rollout_id), new_incarnation=new_name())
        (reply,) = self._client.run_joined([call], subject, deadline=deadline)
        return reply.incarnation

    def _steps(
        self, subject: Subject, encoded: EncodedCall, parts: Sequence[tuple[bytes, bytes]], incarnation: str
    ) -> Iterator[Call]:
        key = self._key(subject.rollout_id)
        for name, part in parts:
            yield scripts.stage(key, name, part, incarnation=incarnation)
        yield scripts.put_staged(
            key,
            subject.model_call_id or "",
            seal=encoded.seal,
            record=encoded.record,
            ids=encoded.token_count,
            part_names=[name for name, _ in encoded.parts],
            incarnation=incarnation,
        )

    def _send(self, calls: Iterable[Call], subject: Subject, deadline: float) -> Reply:
        """Send the steps in few round trips; the reply to the last of them tells what the others came to."""
        trip: list[Call] = []
        nbytes = 0
        for call in calls:
            if trip and nbytes + call.nbytes > _TRIP_BYTES:
                self._client.run_joined(trip, subject, deadline=deadline)
                trip, nbytes = [], 0
            trip.append(call)
            nbytes += call.nbytes
        return self._client.run_joined(trip, subject, deadline=deadline)[-1]


class _Address(NamedTuple):
    """What a staging key names."""

    key: str
    rollout_id: str
    model_call_id: str

    @property
    def subject(self) -> Subject:
        return Subject(self.rollout_id, self.model_call_id)


class RedisStagingSource(_Staging[StagingSourceSettings]):
    """Reads what was staged, and removes it; for workers and trainers, from any number of threads.

    Constructing it does no I/O. Every call ends within ``timeout_s``, retries included.

    Args:
        url: as of the sinks.
        namespace: the one that the sinks of this run use.
        settings: the fields of ``StagingSourceSettings``.

    Raises:
        ConfigurationError: an unknown setting, by name, or a malformed value.
        InvalidIdentifierError: a malformed namespace.

    """

    def __init__(self, url: str | None = None, *, namespace: str = "default", **settings: Any) -> None:
        super().__init__(StagingSourceSettings.build(url, namespace, settings))
        self._chains = ChainCache(self._settings.prefix_cache_bytes)

    def fetch(self, staging_keys: Iterable[str]) -> list[Any]:
        """One ``StagedCallBaseSnapshot`` for each key, in their order; extras and attachments stay behind.

        Raises:
            StagedCallMissingError: nothing is staged under a key; a KeyError that names the first one.
            CorruptRecordError: what is stored is not what was staged.
            UnsupportedFormatError: it was staged by another version of Gym or of this package.
            TypeError: a bare string instead of several keys.
            BackendUnavailableError: no answer in time.

        """
        return [call.base_snapshot() for call in self._calls(staging_keys, self._client.deadline())]

    def fetch_extras(self, staging_key: str) -> dict[str, Any] | None:
        """The extras that were staged under the key, None if there were none; their digest was compared.

        Raises what ``fetch`` does.
        """
        deadline = self._client.deadline()
        (call,) = self._calls([staging_key], deadline)
        address = _address(staging_key)
        extras = self._unpacked(address, call.extras, unpack_extras, deadline)
        if _compute_extras_digest(extras) != call.fields["extras_digest"]:
            raise _damaged("the staged extras do not match their digest", address)
        return extras

    def fetch_attachments(self, staging_key: str) -> dict[str, Any] | None:
        """The attachments that were staged under the key, None if there were none.

        Bytes come as bytes, mappings as dicts, arrays as writable arrays of the same type and shape. What was
        stored was compared with its digests. Raises what ``fetch`` does.
        """
        deadline = self._client.deadline()
        (call,) = self._calls([staging_key], deadline)
        return self._unpacked(_address(staging_key), call.attachments, unpack_attachments, deadline)

    def resolve_prefix(self, admission: Any) -> list[int]:
        """The token ids that a call must begin with, by its ``CaptureAdmission``.

        Of a ``staging_chain`` only what this process does not remember is fetched. Each link must extend the
        hash of the one before it, and the last one end at the hash and length that were admitted, so that
        nothing remembered can be taken for what another attempt has staged.

        Raises:
            CorruptRecordError: the chain does not give the admitted prefix; or as for ``fetch``.
            StagedCallMissingError, BackendUnavailableError: as for ``fetch``.

        """
        if not admission.staging_chain:
            return list(admission.required_prefix_token_ids)
        deadline = self._client.deadline()
        known = self._chains.links(admission.staging_chain)
        links = self._links(admission, known, deadline)
        if links is None and known:
            links = self._links(admission, {}, deadline)
        if links is None:
            raise CorruptRecordError(
                f"the staged chain does not give the prefix that was admitted (call "
                f"{admission.model_call_id!r} of rollout {admission.rollout_id})",
                rollout_id=admission.rollout_id,
                model_call_id=admission.model_call_id,
            )
        self._chains.remember(links)
        ids: list[int] = np.concatenate([link.ids for link in links.values()]).tolist()
        return ids

    def retire(self, rollout_ids: Iterable[str]) -> dict[str, list[str]]:
        """Remove what was staged for rollouts, and refuse what is staged for them later, unknown ones too.

        Returns ``{"removed": [...], "absent": [...]}``, each id once, in the order given: ``removed`` held a
        call.

        Raises:
            TypeError: a bare string, or no iterable. Nothing was touched.
            InvalidIdentifierError: a malformed id among them. Nothing was touched.
            CorruptRecordError, UnsupportedFormatError: of one rollout; others may be retired.
            BackendUnavailableError: not confirmed in time; repeating it is safe.

        """
        return self._end(rollout_ids, self._retire_attempt)

    def delete(self, rollout_ids: Iterable[str]) -> dict[str, list[str]]:
        """Remove what was staged for rollouts, and their fences, so that the ids can be used again.

        Returns and raises what ``retire`` does.
        """
        return self._end(rollout_ids, self._delete_attempt)

    def _calls(self, staging_keys: Iterable[str], deadline: float) -> list[StagedCall]:
        if isinstance(staging_keys, str | bytes):
            raise TypeError(f"staging_keys must be several keys, not one {type(staging_keys).__name__}")
        keys = list(staging_keys)
        addresses = [_address_or_none(key) for key in keys]
        by_rollout: dict[str, dict[str, None]] = {}
        for address in addresses:
            if address is not None:
                by_rollout.setdefault(address.rollout_id, {})[address.model_call_id] = None
        stored = _for_each(by_rollout.items(), lambda item: self._stored_calls(item[0], [*item[1]], deadline))
        found = dict(zip(by_rollout, stored, strict=True))
        calls = []
        for key, address in zip(keys, addresses, strict=True):
            there = found[address.rollout_id].get(address.model_call_id) if address is not None else None
            if address is None or there is None:
                raise _missing(key, address)
            calls.append(decode(*there, address.subject))
        return calls

    def _stored_calls(
        self, rollout_id: str, model_call_ids: Sequence[str], deadline: float
    ) -> dict[str, tuple[bytes, bytes]]:
        """Row and record of those calls of a rollout that are there."""
        names = [kind + call.encode() for call in model_call_ids for kind in (CALL_ROW, RECORD)]
        values = self._values(Subject(rollout_id), names, deadline, reply_bytes=_RECORDS_REPLY_BYTES)
        pairs = zip(model_call_ids, values[::2], values[1::2], strict=True)
        return {call: (row or b"", record or b"") for call, row, record in pairs if row or record}

    def _unpacked(
        self, address: _Address, names: list[bytes] | None, unpack: Callable[[bytes], T], deadline: float
    ) -> T | None:
        """What was stored as these parts."""
        if names is None:
            return None
        distinct_names = list(dict.fromkeys(names))
        fields = [BLOCK + name for name in distinct_names]
        values = self._values(address.subject, fields, deadline, reply_bytes=len(fields) * PART_BYTES)
        parts = PartStore()
        try:
            for name, value in zip(distinct_names, values, strict=True):
                if value is not None:
                    parts.add(name, value)
            return unpack(b"".join(parts.of(names)))
        except (ValueError, TypeError, LookupError):
            if None in values:
                self._calls([address.key], deadline)  # which tells if all was removed meanwhile
            raise _damaged("parts of what was staged are missing or damaged", address) from None

    def _values(
        self, subject: Subject, names: Sequence[bytes], deadline: float, *, reply_bytes: int
    ) -> list[bytes | None]:
        """Values of fields of one attempt, None for those that are not there."""
        values: list[bytes | None] = []
        incarnation = ""
        while len(values) < len(names):
            call = scripts.fields(
                self._key(subject.rollout_id),
                names[len(values) :][:_FIELDS_AT_ONCE],
                incarnation=incarnation,
                max_bytes=self._settings.chunk_bytes,
                reply_bytes=min(reply_bytes, self._settings.chunk_bytes),
            )
            (reply,) = self._client.run_joined([call], subject, deadline=deadline)
            if reply.code != "OK":
                return [None] * len(names)
            incarnation = reply.incarnation
            values += reply.rest[0]
        return values

    def _links(self, admission: Any, known: Mapping[str, Link], deadline: float) -> dict[str, Link] | None:
        """The links of an admitted chain; None if they do not fit together, or not the admission."""
        chain = admission.staging_chain
        missing = [key for key in chain if key not in known]
        fetched = dict(zip(missing, self._calls(missing, deadline), strict=True))
        links: dict[str, Link] = {}
        before: str | None = None
        for key in chain:
            link = known.get(key) or _link(before, fetched[key])
            if link is None or link.parent_hash != before:
                return None
            links[key], before = link, link.chain_hash
        length = sum(len(link.ids) for link in links.values())
        return links if (before, length) == (admission.parent_chain_hash, admission.prev_len) else None

    def _end(
        self, rollout_ids: Iterable[str], end_attempt: Callable[[Subject, float], bool]
    ) -> dict[str, list[str]]:
        subjects = [Subject(validate_rollout_id(rollout_id)) for rollout_id in distinct(rollout_ids)]
        deadline = self._client.deadline()
        outcomes = _for_each(subjects, lambda subject: end_attempt(subject, deadline))
        ended: dict[str, list[str]] = {"removed": [], "absent": []}
        for subject, held in zip(subjects, outcomes, strict=True):
            ended["removed" if held else "absent"].append(subject.rollout_id)
        return ended

    def _retire_attempt(self, subject: Subject, deadline: float) -> bool:
        key, tombstone = self._key(subject.rollout_id), new_name()
        while True:
            (there,) = self._client.run_joined([scripts.peek(key)], subject, deadline=deadline)
            call = scripts.retire(
                key,
                incarnation=there.incarnation,
                new_incarnation=tombstone,
                tombstone_ttl_s=self._settings.tombstone_ttl_s,
            )
            (reply,) = self._client.run_joined([call], subject, deadline=deadline)
            if reply.code == "OK":
                return scripts.held(there) or scripts.held(reply)

    def _delete_attempt(self, subject: Subject, deadline: float) -> bool:
        key = self._key(subject.rollout_id)
        while True:
            (there,) = self._client.run_joined([scripts.peek(key)], subject, deadline=deadline)
            call = scripts.delete(key, incarnation=there.incarnation)
            (reply,) = self._client.run_joined([call], subject, deadline=deadline)
            if reply.code == "OK" or there.code == "ABSENT":  # what came in between is another attempt
                return scripts.held(there) or scripts.held(reply)


def _address(staging_key: str) -> _Address:
    """What the key names.

    Raises:
        InvalidIdentifierError: it is no key that a sink of this package has given.

    """
    if not isinstance(staging_key, str):
        raise InvalidIdentifierError(
            f"a staging key must be a string, not of type {type(staging_key).__name__}"
        )
    rollout_id, _, call = staging_key.partition("/")
    validate_rollout_id(rollout_id)
    return _Address(staging_key, rollout_id, validate_call_id(call, rollout_id=rollout_id))


def _address_or_none(staging_key: str) -> _Address | None:
    """The same, or None for a key that no sink has given, under which nothing can be staged."""
    try:
        return _address(staging_key)
    except InvalidIdentifierError:
        return None


def _link(before: str | None, call: StagedCall) -> Link | None:
    """A link of a chain, or None if the call does not extend what is before it."""
    chain_hash = call.fields["chain_hash"]
    if _compute_chain_hash(before, call.ids.tolist()) != chain_hash:
        return None
    return Link(before, chain_hash, call.ids)


def _missing(staging_key: object, address: _Address | None) -> StagedCallMissingError:
    why = "it never was, the server forgot it, or its rollout was removed"
    if address is None:
        why = "it is no staging key; a key is '<rollout>/<call>', as stage returns it"
    return StagedCallMissingError(
        f"nothing is staged under {staging_key!r}: {why}",
        staging_key=str(staging_key),
    )


def _damaged(what: str, address: _Address) -> CorruptRecordError:
    return CorruptRecordError(
        f"{what} ({address.subject})", rollout_id=address.rollout_id, model_call_id=address.model_call_id
    )


def _for_each(items: Iterable[Any], work: Callable[[Any], T]) -> list[T]:
    """Do the work for each item, some at a time, so that they share round trips. All are done if one fails.

    Raises:
        Exception: that of the first item whose work failed.

    """
    listed = list(items)
    if len(listed) < 2:  # noqa: PLR2004 - one needs no threads
        return [work(item) for item in listed]
    with ThreadPoolExecutor(min(len(listed), _ROLLOUTS_AT_ONCE)) as threads:
        futures = [threads.submit(work, item) for item in listed]
    return [future.result() for future in futures]
