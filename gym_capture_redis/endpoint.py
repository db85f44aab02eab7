"""What all clients share: settings, one executor for each event loop, closing, what an outcome means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NoReturn, Self, TypeVar

from gym_capture_redis.errors import (
    CallConflictError,
    CaptureError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from gym_capture_redis.executor import Executor, PerLoop
from gym_capture_redis.healing import Healer
from gym_capture_redis.keys import distinct, rollout_key, validate_rollout_id
from gym_capture_redis.process_bound import ProcessBound
from gym_capture_redis.scripts import Reply
from gym_capture_redis.settings import ConnectionSettings
from gym_capture_redis.subject import Subject

SettingsT = TypeVar("SettingsT", bound=ConnectionSettings)

_REFUSALS: dict[str, tuple[type[CaptureError], str]] = {
    "FROZEN": (TokenCaptureFrozenError, "the rollout is frozen and takes nothing new"),
    "RETIRED": (
        TokenCaptureRetiredError,
        (
            "this attempt of the rollout is over: it was retired, deleted or has expired; "
            "what belongs to a later attempt must come after that one has begun"
        ),
    ),
    "CONFLICT": (
        CallConflictError,
        "the call was reported before, with other content or as refused; the rollout is incomplete now",
    ),
    "OTHER_ROW": (
        CallConflictError,
        "conflicting row: the ledger has another one for the call, or says that it failed; nothing changed",
    ),
    "OTHER_CODE": (CallConflictError, "the call was refused with another code before; nothing changed"),
}


class Endpoint(ProcessBound, Generic[SettingsT]):
    """Base of all clients with an event loop. Opens nothing until it is used.

    ``key`` names what it works on, by namespace and rollout id.
    """

    def __init__(
        self,
        settings: SettingsT,
        healer: Healer | None = None,
        *,
        key: Callable[[str, str], bytes] = rollout_key,
    ) -> None:
        self._settings = settings
        self._key_of = key
        self._healer = healer
        self._executors = PerLoop(self._make_executor)

    async def close(self) -> None:
        """Release the connections of the running event loop. Idempotent.

        Nothing acknowledged is ever pending. A later call opens new connections, so that a record
        that comes late is stored rather than lost.
        """
        await self._executors.close()

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the client."""
        await self.close()

    def __repr__(self) -> str:
        """Class, server and namespace, without credentials."""
        return f"{type(self).__name__}({str(self._settings.url)!r}, namespace={self._settings.namespace!r})"

    def _make_executor(self) -> Executor:
        """An executor for the running event loop, which uses this client for the first time."""
        return Executor(self._settings, self._healer)

    def _key(self, rollout_id: str) -> bytes:
        return self._key_of(self._settings.namespace, validate_rollout_id(rollout_id))

    def _keys(self, rollout_ids: Iterable[str]) -> dict[str, bytes]:
        """The key of each id, once; all are looked at before anything is sent."""
        return {rollout_id: self._key(rollout_id) for rollout_id in distinct(rollout_ids)}


def raise_refusal(reply: Reply, subject: Subject) -> NoReturn:
    """Raise what the outcome of a step means.

    Raises:
        CaptureError: always; ``TokenCaptureFrozenError``, ``TokenCaptureRetiredError`` or
            ``CallConflictError`` as the outcome has it.

    """
    error, why = _REFUSALS.get(
        reply.code, (CaptureError, f"Redis answered with the unknown outcome {reply.code!r}")
    )
    raise error(f"{why} ({subject})", rollout_id=subject.rollout_id, model_call_id=subject.model_call_id)
