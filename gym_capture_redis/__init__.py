"""Redis transport for the training tokens of reinforcement learning rollouts."""

from typing import TYPE_CHECKING, Any

from gym_capture_redis.capture import (
    CaptureContext,
    capture_tokens,
    commit_entry,
    current_capture_context,
    register_call_intent,
    reset_token_sink,
    set_token_sink,
)
from gym_capture_redis.errors import (
    BackendUnavailableError,
    CallConflictError,
    CaptureError,
    ConfigurationError,
    CorruptRecordError,
    DurabilityError,
    InvalidIdentifierError,
    InvalidRecordError,
    RecordTooLargeError,
    StagedCallMissingError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    UnsupportedFormatError,
)
from gym_capture_redis.protocols import (
    FreezeOutcome,
    IncompleteCode,
    IncompleteReason,
    Refusal,
    TokenCaptureSnapshot,
    TokenSink,
    TokenSource,
    install_token_sink,
    install_token_source,
    installed_token_sink,
    installed_token_source,
)
from gym_capture_redis.records import ParentResolutionStatus, TokenEntry
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource
from gym_capture_redis.source_factory import token_source_factory

if TYPE_CHECKING:
    from gym_capture_redis.gym.ledger import RedisCaptureLedger as RedisCaptureLedger
    from gym_capture_redis.gym.lineage import RedisLineageStore as RedisLineageStore
    from gym_capture_redis.gym.staging import RedisStagingSink as RedisStagingSink
    from gym_capture_redis.gym.staging import RedisStagingSource as RedisStagingSource

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "CallConflictError",
    "CaptureContext",
    "CaptureError",
    "ConfigurationError",
    "CorruptRecordError",
    "DurabilityError",
    "FreezeOutcome",
    "IncompleteCode",
    "IncompleteReason",
    "InvalidIdentifierError",
    "InvalidRecordError",
    "ParentResolutionStatus",
    "RecordTooLargeError",
    "RedisTokenSink",
    "RedisTokenSource",
    "Refusal",
    "StagedCallMissingError",
    "TokenCaptureFrozenError",
    "TokenCaptureRetiredError",
    "TokenCaptureSnapshot",
    "TokenEntry",
    "TokenSink",
    "TokenSource",
    "UnsupportedFormatError",
    "__version__",
    "capture_tokens",
    "commit_entry",
    "current_capture_context",
    "install_token_sink",
    "install_token_source",
    "installed_token_sink",
    "installed_token_source",
    "register_call_intent",
    "reset_token_sink",
    "set_token_sink",
    "token_source_factory",
]

_GYM_ONLY = {
    "RedisCaptureLedger": "gym_capture_redis.gym.ledger",
    "RedisLineageStore": "gym_capture_redis.gym.lineage",
    "RedisStagingSink": "gym_capture_redis.gym.staging",
    "RedisStagingSource": "gym_capture_redis.gym.staging",
}
"""Names whose import needs NeMo Gym, and the modules that have them.

They are not in ``__all__``: ``import *`` would import them, and fail where there is no Gym.
"""

if not TYPE_CHECKING:  # else any name would be right

    def __getattr__(name: str) -> Any:
        if name not in _GYM_ONLY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_GYM_ONLY[name]), name)
