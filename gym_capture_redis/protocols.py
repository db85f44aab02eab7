"""The two ends of a capture transport, and the place where a process keeps the ones it uses.

A *sink* runs in every worker and takes the records of model calls; a *source* runs in the trainer and
hands out each rollout as one frozen snapshot (contract, sections 3 and 4). Nothing here knows Redis.

Where Gym is importable, the installed endpoints are Gym's: what is installed through this module is
found by Gym and the other way round.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gym_capture_redis import gym_compat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gym_capture_redis.errors import CaptureError
    from gym_capture_redis.records import TokenEntry

__all__ = [
    "FreezeOutcome",
    "IncompleteCode",
    "IncompleteReason",
    "Refusal",
    "TokenCaptureSnapshot",
    "TokenSink",
    "TokenSource",
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
]


class IncompleteCode(StrEnum):
    """Why a snapshot is incomplete. The values are stable and may be compared and counted."""

    LOST_CALL = "lost-call"
    """The call was announced with ``begin_call``; no record or refusal ever came."""

    MARKED = "marked"
    """A worker said with ``mark_incomplete`` that the rollout lost this call."""

    LOST_STEPS = "lost-steps"
    """The server lost steps that it had acknowledged (a restart, a failover), and nobody put them back."""

    CONFLICT = "conflict"
    """Two contents came for one call id, or both a record and a refusal."""

    CORRUPT = "corrupt"
    """The stored record does not match its digest or cannot be decoded; it is not in the snapshot."""

    MISSING_PARENT = "missing-parent"
    """The entry names a parent call that the snapshot does not hold."""

    TAMPERED = "tampered"
    """The rollout's own counts and what is stored disagree: something was added or removed behind it."""


@dataclass(frozen=True)
class IncompleteReason:
    """One reason why a snapshot is incomplete; ``str()`` of it is a line for a log.

    ``code`` is an `IncompleteCode` value, ``model_call_id`` is empty where the reason is about the
    whole rollout, ``detail`` is free text without token data.
    """

    code: str
    model_call_id: str
    detail: str

    def __str__(self) -> str:
        about = f" (model call {self.model_call_id})" if self.model_call_id else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.code}{about}{detail}"


@dataclass(frozen=True)
class Refusal:
    """A call that the engine refused before it generated anything: settled, without an entry.

    ``details`` holds whatever else was given to ``record_engine_refusal``.
    """

    model_call_id: str
    code: str
    details: Mapping[str, Any]


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    """One rollout as it was frozen (contract, section 4).

    ``entries`` holds each model call once, in no meaningful order: Gym's ``TokenEntry`` where Gym is
    importable, else this package's. ``snapshot_id`` and ``version`` are what ``TokenSource.drop``
    compares. If ``incomplete``, the rollout must not be trained on, and ``reasons`` say why;
    ``refusals`` are no reason. ``stored_bytes`` is the size of what the transport holds for it.

    The first five fields are Gym's; the rest have defaults and are given by keyword.
    """

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    _: KW_ONLY
    reasons: tuple[IncompleteReason, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    stored_bytes: int = 0


@dataclass(frozen=True)
class FreezeOutcome:
    """How freezing one of many rollouts ended: with a snapshot, or with an error."""

    rollout_id: str
    _: KW_ONLY
    snapshot: TokenCaptureSnapshot | None = None
    error: CaptureError | None = None


@runtime_checkable
class TokenSink(Protocol):
    """What a worker writes captured calls to (contract, section 3).

    Two methods are optional; the capture flow uses them where a sink has them:

    - ``async begin_call(rollout_id, model_call_id)`` makes the intent to generate durable. An intent
      without a record makes the snapshot incomplete. If it raises, the model call fails at no cost.
    - ``async record_engine_refusal(rollout_id, *, model_call_id, code, **details)`` settles an intent
      whose call the engine refused.

    A sink defines neither ``__len__`` nor ``__bool__``: callers choose one with ``a or b``.
    """

    async def put(self, entry: TokenEntry) -> None:
        """Store one record; on return it is durable and every reader sees it.

        The same call id with the same content again is a no-op.

        Raises:
            ValueError: the call id is taken by another content (the rollout becomes incomplete in the
                same step), or no reader could load the record again.
            RuntimeError: the rollout is frozen or retired.

        """
        ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record durably that this rollout lost a call, so that it is never trained on.

        May be the first word about a rollout, works after its freeze, and always moves the version.
        It has to be more available than ``put``, whose failures it reports.
        """
        ...

    async def close(self) -> None:
        """Release connections. Repeating it is fine; nothing acknowledged is ever still pending."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """Where a trainer takes frozen rollouts from (contract, section 4)."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Fence the rollout and return it, in one atomic step; no put succeeds after it.

        Repeating it gives the same ``snapshot_id``; version and content differ only if a call was
        marked lost since. An unknown rollout gives an empty, complete snapshot of version 1.

        Raises:
            RuntimeError: the rollout is retired.

        """
        ...

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire exactly the snapshot that was consumed; late writers stay refused.

        True if that snapshot is now retired, also when it already was. False, with nothing touched, if
        the rollout has moved on, has another snapshot or was never frozen.
        """
        ...

    async def close(self) -> None:
        """Release connections. Repeating it is fine."""
        ...


@dataclass
class _Endpoints:
    """What this process has installed, where there is no Gym to keep it."""

    sink: TokenSink | None = None
    source: TokenSource | None = None


_endpoints = _Endpoints()


def install_token_sink(sink: TokenSink | None) -> None:
    """Make ``sink`` this process's default, or clear it with None (contract, section 5).

    It is a default for whoever builds a `CaptureContext`; the sink in a context always wins. The sink
    stays the caller's to close.

    Raises:
        TypeError: ``sink`` lacks put, mark_incomplete or close; the message names what is missing.

    """
    _require_methods("sink", sink, ("put", "mark_incomplete", "close"))
    _endpoints.sink = sink


def installed_token_sink() -> TokenSink | None:
    """Return this process's default sink, or None."""
    return _endpoints.sink


def install_token_source(source: TokenSource | None) -> None:
    """Make ``source`` this process's default, or clear it with None (contract, section 5).

    The source stays the caller's to close.

    Raises:
        TypeError: ``source`` lacks freeze, drop or close; the message names what is missing.

    """
    _require_methods("source", source, ("freeze", "drop", "close"))
    install_in_gym = gym_compat.gym_attribute("protocols", "install_token_source")
    if install_in_gym is None:
        _endpoints.source = source
    else:
        install_in_gym(source)


def installed_token_source() -> TokenSource | None:
    """Return this process's default source, or None."""
    return _endpoints.source


def _require_methods(role: str, endpoint: object, names: tuple[str, ...]) -> None:
    """Refuse an endpoint that would fail at its first use, when a rollout is already at stake."""
    if endpoint is None:
        return
    missing = [name for name in names if not callable(getattr(endpoint, name, None))]
    if missing:
        raise TypeError(
            f"{type(endpoint).__name__} cannot be installed as a token {role}; "
            f"it has no method {', '.join(missing)}."
        )


# Where there is a Gym, its endpoints are the only ones. Its install_token_source is not taken over, only
# called: Gym 0.7 stores a source unseen, and the check above must come first.
globals().update(
    gym_compat.shared_objects(
        "protocols", ("install_token_sink", "installed_token_sink", "installed_token_source")
    )
)
