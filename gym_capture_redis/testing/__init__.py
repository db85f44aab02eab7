"""The contract of a capture transport as tests, for any backend; needs the extra ``testing``.

Subclass ``TokenTransportContract`` for the contract test by test, and run
``token_transport_machine`` for random histories compared with ``ModelTransport``.
"""

import pytest

pytest.register_assert_rewrite(
    f"{__name__}.backend",
    f"{__name__}.contract",
    f"{__name__}.lifecycle",
    f"{__name__}.recording",
    f"{__name__}.stateful",
)

from gym_capture_redis.testing.backend import Feature, TransportUnderTest  # noqa: E402 - after the rewriting
from gym_capture_redis.testing.contract import TokenTransportContract  # noqa: E402
from gym_capture_redis.testing.model import (  # noqa: E402
    Ended,
    ModelSnapshot,
    ModelTransport,
    Outcome,
    Record,
    Writer,
)
from gym_capture_redis.testing.stateful import Clients, token_transport_machine  # noqa: E402

__all__ = [
    "Clients",
    "Ended",
    "Feature",
    "ModelSnapshot",
    "ModelTransport",
    "Outcome",
    "Record",
    "TokenTransportContract",
    "TransportUnderTest",
    "Writer",
    "token_transport_machine",
]
