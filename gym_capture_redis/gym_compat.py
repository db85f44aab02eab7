"""The one place that looks for NeMo Gym, under either of its package names.

Gym is optional: inference workers run without it. Its next release moves the capture package, so
the new name is tried first.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

GYM_PACKAGES = ("nemo_gym.models.token_capture", "nemo_gym.token_id_capture")


@cache
def gym_package() -> ModuleType | None:
    """Gym's token capture package, or None where it is not installed or cannot be imported."""
    for name in GYM_PACKAGES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                logger.warning("%s is installed but cannot be imported: %s.", name, error)
        except ImportError as error:
            logger.warning("%s is installed but cannot be imported: %s.", name, error)
    return None


@cache
def gym_attribute(module: str, name: str) -> Any | None:
    """``name`` of Gym's submodule ``module`` ("records", "sink", …), or None where Gym has none."""
    package = gym_package()
    if package is None:
        return None
    try:
        return getattr(importlib.import_module(f"{package.__name__}.{module}"), name, None)
    except ModuleNotFoundError:
        return getattr(package, name, None)


@cache
def exception_class(name: str, fallback: type[Exception]) -> type[Exception]:
    """Gym's exception class ``name`` wherever it keeps it, else ``fallback``."""
    for module in ("errors", "protocols", "records", "store"):
        found = gym_attribute(module, name)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return fallback
