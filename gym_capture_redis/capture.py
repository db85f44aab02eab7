"""The capture flow: from a served response to a record in a sink, never failing the model call.

::

    set_token_sink(context) → register_call_intent() → the engine generates
        → capture_tokens(response), or commit_entry(entry) where the arrays are at hand
        → reset_token_sink(token)

Contract, section 5. Whoever builds the context chooses its sink, usually the request's own, else
``protocols.installed_token_sink()``. The flow itself never looks at the installed one: a context whose
``token_sink`` is None says that another process stages the record, and counts as committed.

Pass everything after ``token_sink`` to `CaptureContext` by keyword: Gym's has further fields between.

No web framework, Ray, Torch or Redis is imported here.
"""

from __future__ import annotations

from gym_capture_redis import gym_compat
from gym_capture_redis._standalone_capture import (
    CaptureContext,
    capture_tokens,
    commit_entry,
    current_capture_context,
    register_call_intent,
    reset_token_sink,
    set_token_sink,
)

__all__ = [
    "CaptureContext",
    "capture_tokens",
    "commit_entry",
    "current_capture_context",
    "register_call_intent",
    "reset_token_sink",
    "set_token_sink",
]

# In a process with Gym there is one context variable, Gym's; a second flow beside it would see no context
# and silently capture nothing. The imports above then only serve the type checker.
globals().update(gym_compat.shared_objects("sink", __all__))
