"""Reading frozen rollouts: the freeze, all chunks, and many rollouts at once within a bound on memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from functools import partial
from itertools import islice
from typing import TypeVar

from gym_capture_redis import scripts
from gym_capture_redis.codec import EntryType
from gym_capture_redis.endpoint import raise_refusal
from gym_capture_redis.errors import CaptureError
from gym_capture_redis.executor import Executor
from gym_capture_redis.inflight import ByteBudget, Hold
from gym_capture_redis.keys import new_name
from gym_capture_redis.protocols import FreezeOutcome, TokenCaptureSnapshot
from gym_capture_redis.settings import SourceSettings
from gym_capture_redis.snapshot import SnapshotAssembly
from gym_capture_redis.subject import Subject

READERS = 16
"""Rollouts that ``freeze_many`` reads at the same time."""

_DECODE_IN_LOOP_BYTES = 256 * 2**10
"""Rollouts above this size are decoded on a thread: they must not hold the event loop."""

_FETCHED_AHEAD = 4
"""Parts of a rollout that are asked for at once; nobody else's steps shall wait for more of them."""

_LISTED_ID_BYTES = 8
_NEW_ID_BYTES = 12
"""What a stored byte becomes as Python integers: an id takes three bytes stored, and 36 with its place."""

_ARRAY_ID_BYTES = 4
"""Of an id in an array, where calls go apart early and share no buffer."""

_ARRAY_BYTES = 4
"""What a stored byte becomes as an array, while it is put together."""

T = TypeVar("T")

Room = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be read."""


class RolloutReader:
    """Freezes and reads rollouts, their token fields as lists or, with ``arrays``, as numpy arrays."""

    def __init__(
        self, executor: Executor, settings: SourceSettings, entry_type: EntryType, *, arrays: bool
    ) -> None:
        self._executor = executor
        self._chunk_bytes = settings.chunk_bytes
        self._entry_type = entry_type
        self._arrays = arrays

    async def freeze(self, key: bytes, rollout_id: str, room: Room | None = None) -> TokenCaptureSnapshot:
        """Fence the rollout and read all of it; after the fence, wait for ``room`` to read the rest.

        The deadline moves by the time of that wait, which is no fault of the server's.

        Raises:
            CaptureError: see ``RedisTokenSource.freeze``.

        """
        subject = Subject(rollout_id)
        deadline = self._executor.deadline()
        sent = False
        while True:
            call = scripts.freeze(
                key,
                new_incarnation=new_name(),
                new_snapshot_id=new_name(),
                max_bytes=self._chunk_bytes,
            )
            reply = await self._executor.run(call, subject, deadline=deadline, sent=sent)
            sent = True
            if reply.code != "OK":
                raise_refusal(reply, subject)
            frozen = scripts.Frozen.parse(reply)
            if room is not None:
                begin = asyncio.get_running_loop().time()
                await room(self._decoded_bytes(frozen.facts))
                deadline += asyncio.get_running_loop().time() - begin
            assembly = SnapshotAssembly(rollout_id, frozen, self._entry_type, arrays=self._arrays)
            rollout = FrozenRollout(
                self._executor, key, frozen, subject, deadline=deadline, chunk_bytes=self._chunk_bytes
            )
            if await rollout.read_into(assembly):
                return await rollout.decode(assembly.finish)

    def _decoded_bytes(self, facts: scripts.Facts) -> int:
        """About how much memory the rollout takes once it is read."""
        if self._arrays:
            return _ARRAY_ID_BYTES * facts.ids + _ARRAY_BYTES * facts.stored_bytes
        return _LISTED_ID_BYTES * facts.ids + _NEW_ID_BYTES * facts.stored_bytes


class FrozenRollout:
    """What a rollout held when it was frozen, read within one deadline."""

    def __init__(
        self,
        executor: Executor,
        key: bytes,
        frozen: scripts.Frozen,
        subject: Subject,
        *,
        deadline: float,
        chunk_bytes: int,
    ) -> None:
        self._executor = executor
        self._key = key
        self._frozen = frozen
        self._subject = subject
        self._deadline = deadline
        self._chunk_bytes = chunk_bytes

    async def read_into(self, assembly: SnapshotAssembly) -> bool:
        """Read all chunks, and the parts that they name. False if it is another snapshot by now."""
        chunk: scripts.Chunk | None = self._frozen.chunk
        gone: list[bytes] = []
        while chunk is not None:
            is_last = chunk.next_seq > assembly.last_seq
            # The next chunk is on its way while this one is decoded.
            reading = None if is_last else asyncio.create_task(self._chunk(chunk.next_seq))
            try:
                await self._executor.turn()
                await self.decode(partial(assembly.add, chunk))
                gone += await self._parts_into(assembly, chunk.part_names())
                if reading is None:
                    return not gone or await self._ask_again(assembly, gone)
                chunk = await reading
            finally:
                if reading is not None:
                    reading.cancel()
        return False

    async def decode(self, work: Callable[[], T]) -> T:
        """Decode here if the rollout is small, else on a thread, so that the event loop is not held."""
        if self._frozen.facts.stored_bytes > _DECODE_IN_LOOP_BYTES:
            return await self._executor.offload(work, self._subject, deadline=self._deadline, sent=True)
        return work()

    async def _run(self, call: scripts.Call) -> scripts.Reply:
        return await self._executor.run(call, self._subject, deadline=self._deadline, sent=True)

    async def _chunk(self, from_seq: int) -> scripts.Chunk | None:
        """The rows from this step on. None if it is another snapshot by now."""
        call = scripts.read(
            self._key,
            incarnation=self._frozen.reply.incarnation,
            snapshot_id=self._frozen.snapshot_id,
            version=self._frozen.reply.version,
            from_seq=from_seq,
            max_bytes=self._chunk_bytes,
        )
        reply = await self._run(call)
        if reply.code == "CHANGED":
            return None
        if reply.code != "OK":
            raise_refusal(reply, self._subject)
        return scripts.Chunk.parse(*reply.rest)

    async def _parts_into(self, assembly: SnapshotAssembly, names: list[bytes]) -> list[bytes]:
        """Read parts, some of them on their way while another is checked. Returns those that are gone."""
        gone: list[bytes] = []
        fetching: deque[asyncio.Task[scripts.Reply]] = deque()
        following = iter(names)
        try:
            for name in names:
                for wanted in islice(following, _FETCHED_AHEAD - len(fetching)):
                    fetching.append(asyncio.create_task(self._run(scripts.fetch(self._key, wanted))))
                (content,) = (await fetching.popleft()).rest
                if content is None:
                    gone.append(name)
                else:
                    assembly.add_part(name, content)
        finally:
            for task in fetching:
                task.cancel()
        return gone

    async def _ask_again(self, assembly: SnapshotAssembly, names: list[bytes]) -> bool:
        """Read parts that were not there, once it is known to be the same snapshot. False if it is not.

        A server that is no primary any more may lack them; it refuses the script.
        """
        if await self._chunk(assembly.last_seq + 1) is None:
            return False
        for name in await self._parts_into(assembly, names):
            assembly.add_part(name, None)
        return True


class ManyRollouts:
    """Freezes rollouts, at most ``READERS`` at a time, and gives their outcomes as they come.

    ``budget`` bounds what was read and not taken yet. ``first_bytes`` is what the freeze itself may bring,
    before the size of a rollout is known.
    """

    def __init__(
        self,
        rollout_ids: Iterable[str],
        freeze: Callable[[str, Room], Awaitable[TokenCaptureSnapshot]],
        budget: ByteBudget,
        first_bytes: int,
    ) -> None:
        self._waiting = iter(rollout_ids)
        self._freeze = freeze
        self._budget = budget
        self._first_bytes = first_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: asyncio.Queue[tuple[FreezeOutcome, Hold] | Exception] = asyncio.Queue()
        self._outstanding = 0

    async def outcomes(self) -> AsyncGenerator[FreezeOutcome, None]:
        """Each outcome once. Reading goes on while one is used, and ends when the iterator is closed."""
        try:
            self._start_more()
            while self._outstanding:
                item = await self._finished.get()
                self._outstanding -= 1
                if isinstance(item, Exception):
                    raise item
                outcome, held = item
                with held:  # until here: now it is the caller's
                    self._start_more()
                yield outcome
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_more(self) -> None:
        for rollout_id in islice(self._waiting, READERS - self._outstanding):
            task = asyncio.create_task(self._read(rollout_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._outstanding += 1

    async def _read(self, rollout_id: str) -> None:
        held = await self._budget.hold(self._first_bytes)

        async def room(nbytes: int) -> None:
            nonlocal held
            held.end()  # never to wait for more while holding some: all readers might do that
            held = await self._budget.hold(nbytes)

        try:
            outcome = FreezeOutcome(rollout_id, snapshot=await self._freeze(rollout_id, room))
        except CaptureError as error:
            outcome = FreezeOutcome(rollout_id, error=error)
        except Exception as error:  # noqa: BLE001 - raised where the outcomes are taken
            self._finished.put_nowait(error)
            return
        self._finished.put_nowait((outcome, held))
