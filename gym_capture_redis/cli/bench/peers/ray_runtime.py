"""A private Ray on this machine, shared by the contenders that need one."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any


def is_installed(package: str) -> bool:
    """Whether the package is there, without importing it."""
    return importlib.util.find_spec(package) is not None


def start_ray() -> Any:
    """Ray, started if it is not; never somebody's cluster that the environment names."""
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    return ray


def stop_ray() -> None:
    """End it, and every actor in it. Idempotent."""
    importlib.import_module("ray").shutdown()
