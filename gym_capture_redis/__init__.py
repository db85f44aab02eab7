"""Redis transport for the training tokens of reinforcement learning rollouts."""

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
]
