"""The one place that looks for NeMo Gym, under either of its package names.

Gym is optional: inference workers run without it. Its next release moves the capture package, so
the new name is tried first.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

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
        except Exception as error:  # noqa: BLE001  # a syntax error too, where Gym needs a newer Python
            logger.warning("%s is installed but cannot be imported: %s.", name, error)
    return None


@cache
def gym_attribute(module: str, name: str) -> Any | None:
    """``name`` of Gym's submodule ``module`` ("records", "sink", …), or None where Gym has none."""
    package = gym_package()
    if package is None:
        return None
    try:
        home: ModuleType = importlib.import_module(f"{package.__name__}.{module}")
    except ModuleNotFoundError:
        home = package
    return getattr(home, name, getattr(package, name, None))


def required_attribute(module: str, name: str, *, since: str = "0.6") -> Any:
    """``name`` of Gym's submodule ``module``, for what works in Gym only; ``since`` is its first release.

    Raises:
        ImportError: Gym is not here, or has no such thing; the message says what to install.

    """
    found = gym_attribute(module, name)
    if found is None:
        lacks = f"the installed NeMo Gym has no {name}" if gym_package() else "NeMo Gym is not installed"
        raise ImportError(
            f"{lacks}; this part of gym-capture-redis needs `pip install 'nemo-gym>={since}'` "
            "(--no-deps --ignore-requires-python where pip refuses this Python; see docs/nemo-gym.md)"
        )
    return found


def shared_objects(module: str, names: Sequence[str]) -> dict[str, Any]:
    """Gym's own objects of these names, or an empty dict where there is no Gym.

    All or nothing. Half of Gym's and half of ours would look right and capture nothing: a context set
    in one variable would be looked for in the other.

    Raises:
        ImportError: Gym is here but lacks some of the names; the message says which.

    """
    if gym_package() is None:
        return {}
    found = {name: gym_attribute(module, name) for name in names}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ImportError(
            f"The installed NeMo Gym has no {', '.join(missing)} to share, so captured tokens could go "
            "unnoticed past it. Install a version of gym-capture-redis and of nemo-gym that fit."
        )
    return found


@cache
def exception_class(name: str, fallback: type[Exception]) -> type[Exception]:
    """Gym's exception class ``name`` wherever it keeps it, else ``fallback``."""
    for module in ("errors", "protocols", "records", "store"):
        found = gym_attribute(module, name)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return fallback
