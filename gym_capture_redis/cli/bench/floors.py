"""Two limits that no disk and no server decides: what any writer and any reader of Python lists must pay."""

from __future__ import annotations

import gc
import struct
import time
from collections.abc import Iterable
from typing import Any

from gym_capture_redis.cli.bench.workload import Rollout


def pack(entry: Any) -> None:
    """Make bytes of the ids of prompt and generation, and nothing else."""
    struct.pack(f"<{len(entry.prompt_token_ids)}I", *entry.prompt_token_ids)
    struct.pack(f"<{len(entry.generation_token_ids)}I", *entry.generation_token_ids)


def packing_seconds(rollouts: Iterable[Rollout]) -> float:
    """Time to pack the ids of all calls."""
    begin = time.perf_counter()
    for rollout in rollouts:
        for entry in rollout:
            pack(entry)
    return time.perf_counter() - begin


def slicing_seconds(rollouts: Iterable[Rollout]) -> float:
    """Time to cut each prompt out of the last and longest one of its rollout."""
    kept: list[list[int]] = []
    gc.collect()
    begin = time.perf_counter()
    for rollout in rollouts:
        whole = rollout[-1].prompt_token_ids
        kept.extend(whole[: len(entry.prompt_token_ids)] for entry in rollout)
    return time.perf_counter() - begin
