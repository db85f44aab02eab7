"""What a server tells of itself at one moment: its processor time, append-only file and memory.

Differences of two readings are right only on a server that nobody else uses meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from gym_capture_redis.cli.bench.servers import Server

SETTLING_S = 5.0
"""How long the server may take to write its append-only buffer to the file, and to free what was unlinked."""
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Reading:
    """What INFO tells."""

    cpu_s: float
    """Of the thread that runs commands."""
    aof_bytes: int
    aof_base_bytes: int
    memory_bytes: int
    pipelines: int

    @classmethod
    async def take(cls, server: Server) -> Reading:
        """Ask once the server has done what it still had to do."""
        deadline = time.monotonic() + SETTLING_S
        info = server.info()
        while _is_busy(info) and time.monotonic() < deadline:
            await asyncio.sleep(_PAUSE_S)
            info = server.info()
        return cls(
            cpu_s=info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"],
            aof_bytes=info.get("aof_current_size", 0),
            aof_base_bytes=info.get("aof_base_size", 0),
            memory_bytes=info["used_memory"],
            pipelines=_calls(info, "echo") or _calls(info, "evalsha"),
        )


def _is_busy(info: dict[str, Any]) -> bool:
    return bool(info.get("aof_buffer_length") or info.get("lazyfree_pending_objects"))


def _calls(info: dict[str, Any], command: str) -> int:
    calls: int = info.get(f"cmdstat_{command}", {}).get("calls", 0)
    return calls
