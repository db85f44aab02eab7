"""Arrays in and out: what ``freeze_arrays`` gives equals what ``freeze`` gives, and so does what is put."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.sample_entries import as_numpy, exact, exact_dump, sample_entry
from support.sequences import growing_conversation
from support.servers import RealServer

from gym_capture_redis.blocks import BLOCK_IDS
from gym_capture_redis.keys import rollout_key
from gym_capture_redis.protocols import TokenCaptureSnapshot
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

ARRAY_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")

VARIANTS: dict[str, dict[str, Any]] = {
    "small": {},
    "no-experts": {"routed_experts": None},
    "route": {"routed_experts": "nrlre1:int8:1x1x1:AA=="},
    "ragged": {"routed_experts": [[1], [2, 3]]},
    "negative-experts": {"routed_experts": [[[-1, 300]], [[0, 5]]]},
    "wide-ids": {"prompt_token_ids": [1, 2**31], "generation_token_ids": [2**40, 5]},
    "widest-ids": {"prompt_token_ids": [2**63 - 1]},
    "long": {"prompt_token_ids": list(range(5 * BLOCK_IDS + 7))},
    "long-and-wide": {"prompt_token_ids": [*range(3 * BLOCK_IDS), 2**33]},
    "inexact-log-probs": {"generation_log_probs": [-0.1, -1e-9]},
    "exact-log-probs": {"generation_log_probs": [-0.5, -0.0]},
    "nothing-generated": {
        "generation_token_ids": [],
        "generation_log_probs": [],
        "routed_experts": None,
    },
}


class Clients:
    def __init__(self, server: RealServer, namespace: str) -> None:
        self.server = server
        self.key = rollout_key(namespace, "r")
        self.sink = RedisTokenSink(server.url, namespace=namespace)
        self.source = RedisTokenSource(server.url, namespace=namespace, chunk_bytes=4_096)

    def stored(self) -> Any:
        with self.server.client() as client:
            return client.hgetall(self.key)

    async def freeze_both(self) -> tuple[TokenCaptureSnapshot, TokenCaptureSnapshot]:
        """With lists, and with arrays."""
        return await self.source.freeze("r"), await self.source.freeze_arrays("r")


@pytest.fixture
async def clients(real_server: RealServer, namespace: str) -> AsyncIterator[Clients]:
    made = Clients(real_server, namespace)
    async with made.sink, made.source:
        yield made


def listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def id_type(ids: list[int]) -> str:
    return "int32" if max(ids, default=0) < 2**31 else "int64"


def log_prob_type(values: list[float]) -> str:
    return "float32" if all(float(np.float32(value)) == value for value in values) else "float64"


async def test_a_snapshot_with_arrays_says_the_same_as_one_with_lists(clients: Clients) -> None:
    for call, fields in VARIANTS.items():
        await clients.sink.put(sample_entry("r", call, note=call, **fields))
    await clients.sink.begin_call("r", "open")
    await clients.sink.record_engine_refusal("r", model_call_id="refused", code="full", why="x")
    lists, arrays = await clients.freeze_both()
    for name in ("rollout_id", "snapshot_id", "version", "incomplete", "reasons", "refusals"):
        assert getattr(arrays, name) == getattr(lists, name)
    assert arrays.incomplete
    assert len(lists.entries) == len(arrays.entries) == len(VARIANTS)
    for entry, expected in zip(arrays.entries, lists.entries, strict=True):
        assert type(entry) is type(expected)
        fields, expected_fields = dict(entry), dict(expected)
        for name in ARRAY_FIELDS:
            assert exact(listed(fields.pop(name))) == exact(expected_fields.pop(name)), name
        assert fields == expected_fields
        assert entry.model_extra == expected.model_extra


@pytest.mark.parametrize("call", VARIANTS)
async def test_arrays_have_the_narrowest_type_that_is_exact(clients: Clients, call: str) -> None:
    entry = sample_entry("r", call, **VARIANTS[call])
    await clients.sink.put(entry)
    found: Any = (await clients.source.freeze_arrays("r")).entries[0]
    ids = [*entry.prompt_token_ids, *entry.generation_token_ids]
    # Prompt and generation are views of one buffer, so that both have the type that any of them needs.
    assert found.prompt_token_ids.dtype.name == found.generation_token_ids.dtype.name == id_type(ids)
    assert found.generation_log_probs.dtype.name == log_prob_type(entry.generation_log_probs)
    nested = isinstance(entry.routed_experts, list) and call != "ragged"
    assert isinstance(found.routed_experts, np.ndarray) == nested
    if nested:
        assert found.routed_experts.dtype.kind in "iu"
        assert found.routed_experts.ndim == 3


async def test_the_prompts_of_one_conversation_share_their_memory(clients: Clients) -> None:
    turns = growing_conversation(6, 700)
    for number, ids in enumerate(turns):
        parts = {"prompt_token_ids": ids[:-2], "generation_token_ids": ids[-2:]}
        await clients.sink.put(sample_entry("r", f"c{number}", **parts))
    found: Any = (await clients.source.freeze_arrays("r")).entries
    assert [[*entry.prompt_token_ids, *entry.generation_token_ids] for entry in found] == turns
    longest = found[-1].prompt_token_ids
    for entry in found:
        assert np.shares_memory(entry.prompt_token_ids, longest)
    for entry in found[:-1]:
        assert np.shares_memory(entry.generation_token_ids, longest)


@pytest.mark.parametrize("arrays_first", [False, True])
async def test_arrays_and_lists_of_the_same_content_are_the_same_record(
    clients: Clients, arrays_first: bool
) -> None:
    entries = [sample_entry("r", call, **fields) for call, fields in VARIANTS.items() if call != "ragged"]
    forms = [entries, [as_numpy(entry) for entry in entries]]
    for entry in forms[arrays_first]:
        await clients.sink.put(entry)
    before = clients.stored()
    for entry in forms[not arrays_first]:
        await clients.sink.put(entry)
    assert clients.stored() == before
    snapshot = await clients.source.freeze("r")
    assert not snapshot.incomplete
    assert [exact_dump(entry) for entry in snapshot.entries] == [exact_dump(entry) for entry in entries]


async def test_what_was_read_with_arrays_may_be_put_again(clients: Clients) -> None:
    for call, fields in VARIANTS.items():
        await clients.sink.put(sample_entry("r", call, **fields))
    snapshot = await clients.source.freeze_arrays("r")
    before = clients.stored()
    for entry in snapshot.entries:
        await clients.sink.put(entry)
    assert clients.stored() == before
