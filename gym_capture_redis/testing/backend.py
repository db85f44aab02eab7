"""What a backend says of itself to the contract suite, and the words the tests are written in."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar, Literal, TypeVar, cast

import pytest
import pytest_asyncio

from gym_capture_redis.errors import CallConflictError, TokenCaptureFrozenError, TokenCaptureRetiredError
from gym_capture_redis.records import TokenEntry

Feature = Literal[True] | str
"""True, or the reason why a backend does not have it: the tests of it are skipped with that reason."""

_Test = TypeVar("_Test", bound=Callable[..., Coroutine[Any, Any, None]])


class TransportUnderTest:
    """Base of the suite. A subclass gives fresh clients and says what its backend has.

    Each call of ``make_sink`` and ``make_source`` gives a new client of the same backend; the suite
    closes it. Rollout ids are unique, so that tests may share a backend.
    """

    pytestmark = pytest.mark.asyncio

    entry_type: ClassVar[Any] = TokenEntry
    """Class of the entries that are put."""

    frozen_error: ClassVar[type[Exception]] = TokenCaptureFrozenError
    retired_error: ClassVar[type[Exception]] = TokenCaptureRetiredError
    conflict_error: ClassVar[type[Exception]] = CallConflictError

    has_refusals: ClassVar[Feature] = True
    """``record_engine_refusal``, and ``refusals`` in snapshots."""
    has_retire: ClassVar[Feature] = True
    """``retire`` takes a batch of rollouts."""
    has_delete: ClassVar[Feature] = True
    """``delete`` takes a batch of rollouts."""
    repeats_put_after_freeze: ClassVar[Feature] = True
    """An identical put on a frozen rollout is a no-op."""
    fences_attempts: ClassVar[Feature] = True
    """A call announced to an earlier attempt cannot touch the one that reuses its rollout id."""
    refuses_bad_records: ClassVar[Feature] = True
    """``put`` checks again what may have changed since the entry was built."""
    refuses_bad_ids: ClassVar[Feature] = True
    """Malformed rollout and call ids are refused by every method."""
    checks_parents: ClassVar[Feature] = True
    """An entry whose parent is missing makes the snapshot incomplete."""
    errors_name_the_call: ClassVar[Feature] = True
    """Errors have ``rollout_id`` and ``model_call_id``."""
    has_context_managers: ClassVar[Feature] = True
    """Clients are asynchronous context managers."""

    rollout_id: str

    def make_sink(self) -> Any:
        """Return a new sink. A subclass must define this."""
        raise NotImplementedError

    def make_source(self) -> Any:
        """Return a new source of what the sinks store. A subclass must define this."""
        raise NotImplementedError

    @pytest_asyncio.fixture(autouse=True)
    async def _fresh_rollout(self) -> AsyncIterator[None]:
        """Give the test a rollout of its own, and close its clients when it is over."""
        self.rollout_id = f"rollout-{uuid.uuid4().hex}"
        self._clients: list[Any] = []
        yield
        for client in self._clients:
            await client.close()

    def require(self, feature: str) -> None:
        """Skip the running test where the backend does not have ``feature``."""
        supported: Feature = getattr(self, feature)
        if supported is not True:
            pytest.skip(f"{feature}: {supported}")

    def sink(self) -> Any:
        """Return a new sink, closed when the test is over."""
        client = self.make_sink()
        self._clients.append(client)
        return client

    def source(self) -> Any:
        """Return a new source, closed when the test is over."""
        client = self.make_source()
        self._clients.append(client)
        return client

    def entry(self, model_call_id: str = "call-1", **fields: Any) -> Any:
        """Build a small valid entry of the test's rollout; equal arguments give an equal entry."""
        defaults = {
            "rollout_id": self.rollout_id,
            "model_call_id": model_call_id,
            "prompt_token_ids": [1, 2, 3],
            "generation_token_ids": [4, 5],
            "generation_log_probs": [-0.5, -0.25],
            "created_at": 1_700_000_000.0,
        }
        return self.entry_type(**defaults | fields)

    def other(self, model_call_id: str = "call-1") -> Any:
        """Build an entry of the same call with other content."""
        return self.entry(model_call_id, generation_token_ids=[4, 6])

    async def put(self, entry: Any) -> None:
        """Put through a new sink, as another worker would."""
        await self.sink().put(entry)

    async def begin(self, model_call_id: str = "call-1") -> None:
        """Announce a call of the test's rollout through a new sink."""
        await self.sink().begin_call(self.rollout_id, model_call_id)

    async def mark(self, model_call_id: str = "call-1") -> None:
        """Mark the test's rollout through a new sink."""
        await self.sink().mark_incomplete(self.rollout_id, model_call_id)

    async def refuse(self, model_call_id: str = "call-1", code: str = "context-length") -> None:
        """Record a refusal in the test's rollout through a new sink."""
        await self.sink().record_engine_refusal(self.rollout_id, model_call_id=model_call_id, code=code)

    async def freeze(self) -> Any:
        """Freeze the test's rollout through a new source."""
        return await self.source().freeze(self.rollout_id)

    async def drop(self, snapshot: Any) -> bool:
        """Drop what was consumed, through a new source."""
        dropped: bool = await self.source().drop(
            snapshot.rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version
        )
        return dropped

    async def given_open(self) -> Any:
        """Make the rollout open, at version 1, and return the entry it holds."""
        entry = self.entry()
        await self.put(entry)
        return entry

    async def given_frozen(self) -> Any:
        """Make the rollout frozen, at version 2 and with one entry, and return the snapshot."""
        await self.given_open()
        return await self.freeze()

    async def given_retired(self, by: str) -> Any:
        """Make the rollout retired by "drop" or "retire", and return its last snapshot."""
        snapshot = await self.given_frozen()
        if by == "drop":
            assert await self.drop(snapshot)
        else:
            self.require("has_retire")
            await self.source().retire([self.rollout_id])
        return snapshot

    async def assert_unchanged(self, snapshot: Any) -> None:
        """Check that freezing again gives the same snapshot."""
        assert facts(await self.freeze()) == facts(snapshot)

    async def assert_still_retired(self, snapshot: Any) -> None:
        """Check that the tombstone of ``snapshot`` is in its place."""
        with pytest.raises(self.retired_error):
            await self.freeze()
        assert await self.drop(snapshot)


def needs(feature: str) -> Callable[[_Test], _Test]:
    """Skip the test where the backend does not have ``feature``."""

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        async def run(self: TransportUnderTest, *args: Any, **kwargs: Any) -> None:
            self.require(feature)
            await test(self, *args, **kwargs)

        return cast("_Test", run)

    return decorate


def exact(entry: Any) -> str:
    """Return the entry as text that differs wherever a bit does: -0.0 from 0.0, 1 from 1.0 and True."""
    return json.dumps(entry.model_dump(mode="json"), sort_keys=True)


def contents(snapshot: Any) -> dict[str, str]:
    """Return the exact content of every call; fails if a call is there twice."""
    found = {entry.model_call_id: exact(entry) for entry in snapshot.entries}
    assert len(found) == len(snapshot.entries)
    return found


def facts(snapshot: Any) -> tuple[str, str, int, bool, dict[str, str]]:
    """Return everything the contract says of a snapshot, without the order of its entries."""
    return (
        snapshot.rollout_id,
        snapshot.snapshot_id,
        snapshot.version,
        snapshot.incomplete,
        contents(snapshot),
    )
