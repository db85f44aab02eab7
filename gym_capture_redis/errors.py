"""Every failure this package reports, as one family.

::

    CaptureError
    ├── TokenCaptureFrozenError    RuntimeError  the rollout was frozen; nothing new joins it
    ├── TokenCaptureRetiredError   RuntimeError  the rollout was retired, deleted or has expired
    ├── CallConflictError          ValueError    one call id, two different contents
    ├── InvalidIdentifierError     ValueError    a rollout id, call id or namespace is malformed
    ├── InvalidRecordError         ValueError    a record that no reader could load again
    │   └── RecordTooLargeError                  a record above ``max_record_bytes``
    ├── StagedCallMissingError     KeyError      nothing is staged under this key
    ├── CorruptRecordError                       what Redis holds is not what was written
    ├── UnsupportedFormatError                   what Redis holds was written by a newer version
    ├── BackendUnavailableError                  Redis did not answer, or refused, within the deadline
    ├── DurabilityError                          the promised durability cannot be kept, or was not confirmed
    └── ConfigurationError         ValueError    a setting, URL or installation is wrong

Where Gym defines an error of the same name, ours is also a subclass of Gym's, so that handlers
written for Gym keep working (contract, section 4). No message holds token data or a password.
"""

from __future__ import annotations

from gym_capture_redis import gym_compat


class CaptureError(Exception):
    """Base of the family. ``rollout_id`` and ``model_call_id`` say what it is about, if anything."""

    def __init__(
        self, message: str, *, rollout_id: str | None = None, model_call_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.rollout_id = rollout_id
        self.model_call_id = model_call_id


_GymFrozen = gym_compat.exception_class("TokenCaptureFrozenError", RuntimeError)
_GymRetired = gym_compat.exception_class("TokenCaptureRetiredError", RuntimeError)


class TokenCaptureFrozenError(CaptureError, _GymFrozen):  # type: ignore[misc, valid-type]
    """The rollout was frozen before this step arrived. The step changed nothing."""


class TokenCaptureRetiredError(CaptureError, _GymRetired):  # type: ignore[misc, valid-type]
    """The attempt this step belongs to was retired, deleted or has expired. Nothing changed."""


class CallConflictError(CaptureError, ValueError):
    """A call id came with two contents, or with both a record and a refusal."""


class InvalidIdentifierError(CaptureError, ValueError):
    """An identifier is outside its alphabet or length. Nothing was sent."""


class InvalidRecordError(CaptureError, ValueError):
    """A record breaks a rule of contract section 2. Nothing was sent."""


class RecordTooLargeError(InvalidRecordError):
    """The encoded record exceeds ``max_record_bytes``. Nothing was sent."""


class StagedCallMissingError(CaptureError, KeyError):
    """Nothing is staged under a key: it never was, the server forgot it, or its rollout was removed.

    ``staging_key`` is the first such key among those asked for.
    """

    def __init__(self, message: str, *, staging_key: str, rollout_id: str | None = None) -> None:
        super().__init__(message, rollout_id=rollout_id)
        self.staging_key = staging_key

    def __str__(self) -> str:
        """The message; a KeyError would show its repr."""
        return str(self.args[0])


class CorruptRecordError(CaptureError):
    """Stored bytes are truncated, edited or of the wrong type; no content is guessed from them."""


class UnsupportedFormatError(CaptureError):
    """Stored data has a format or schema number newer than this version reads. Upgrade the reader."""


class BackendUnavailableError(CaptureError):
    """Redis could not be reached, did not answer in time, or refused the step for now.

    A write that ends so may or may not have been applied; repeating the same step is safe.
    """


class DurabilityError(CaptureError):
    """The chosen durability is not reached.

    Either the server's configuration cannot keep it, and nothing was written; or the step was applied, and
    its fsync or its copy on replicas was not confirmed in time: repeating it is safe.
    """


class ConfigurationError(CaptureError, ValueError):
    """A setting or URL is unknown or malformed, or a needed package or server is missing."""
