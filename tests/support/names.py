"""Names for the values of parametrized tests."""

from __future__ import annotations

import re
from typing import Any


def steady_repr(value: Any) -> str:
    """The repr without memory addresses: workers that share out the tests must find the same names."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
