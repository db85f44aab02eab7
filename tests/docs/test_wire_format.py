"""The wire format is what its page says, read by nothing but that page."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from support.sample_entries import sample_entry
from support.sequences import random_ids
from support.stored_state import ENDS, WORDS

from gym_capture_redis import codec, scripts, small_fields
from gym_capture_redis.codec import encode

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
LIMIT = 2**20

ENTRIES: list[dict[str, Any]] = [
    {},
    {"routed_experts": None, "output_items": [], "token_item_index": None, "response_id": None, "model": ""},
    {"routed_experts": "nrlre1:int8:2x1x2:AQIDBA=="},
    {"routed_experts": {"b": 1, "a": "é"}, "note": {"é": [1, 1.0, True, None]}},
    {"prompt_token_ids": random_ids(600), "cum_len": 602, "parent_call_id": "parent"},
    {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []},
    {"prompt_token_ids": random_ids(900, below=2**63), "prefix_supplied": True, "created_at": -0.0},
]


def omitted_by_the_page() -> dict[str, Any]:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|$", PAGE.partition("field left out")[2], re.MULTILINE)
    return {name: json.loads(value) for name, value in rows}


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def body_by_the_page(head_of_x: list[Any], body: Any) -> bytes:
    if head_of_x[:1] == ["json"]:
        return canonical_json(body)
    return b"".join(body) if isinstance(body, list) else bytes(body)


def digest_by_the_page(record: dict[str, Any], rollout_id: str, call: str) -> bytes:
    *head_of_x, body = record["x"] or [b""]
    parts = [
        canonical_json(record["e"]),
        record["c"],
        record["t"][1],
        record["l"][1],
        body_by_the_page(head_of_x, body),
    ]
    lengths = [len(part) for part in parts]
    head = [rollout_id, call, record["t"][0], record["p"], record["l"][0], head_of_x, lengths]
    return hashlib.blake2b(msgpack.packb(head) + b"".join(parts), digest_size=32).digest()


def test_the_page_lists_the_values_that_are_left_out() -> None:
    assert canonical_json(omitted_by_the_page()) == canonical_json(small_fields.OMITTED_VALUES)


def test_the_page_gives_the_words_of_the_state_in_their_order() -> None:
    (line,) = re.findall(r"^(<format> .*)$", PAGE, re.MULTILINE)
    assert line.split(" ") == [f"<{name}>" for name in (*WORDS, ENDS)]
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.partition("| word | |")[2].partition("\n\n")[0], re.MULTILINE)
    assert rows == [*WORDS, ENDS]


def test_the_page_gives_the_size_up_to_which_steps_share_a_call() -> None:
    assert f"more than {scripts.MAX_JOINED_BYTES // 1024} KiB" in PAGE


@pytest.mark.parametrize("fields", ENTRIES, ids=",".join)
def test_a_record_and_its_digest_are_as_the_page_says(fields: dict[str, Any]) -> None:
    entry = sample_entry("some-rollout", "some-call", **fields)
    encoded = encode(entry, max_record_bytes=LIMIT)
    record = msgpack.unpackb(encoded.record)
    assert list(record) == ["v", "e", "c", "t", "p", "l", "x"]
    digest = digest_by_the_page(record, "some-rollout", "some-call")
    checked = msgpack.packb(["some-rollout", "some-call"]) + digest + encoded.record
    assert encoded.seal == digest + xxhash.xxh3_128_digest(checked)
    arrays = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}
    omitted = omitted_by_the_page()
    expected = {
        name: value
        for name, value in entry.model_dump(mode="json", exclude=arrays).items()
        if name not in ("rollout_id", "model_call_id") and not (name in omitted and omitted[name] == value)
    }
    assert canonical_json(record["e"]) == canonical_json(expected)


@pytest.mark.parametrize("nbytes", [2**20, 2**20 + 1, 3 * 2**20])
def test_a_long_body_is_in_parts_as_the_page_says(nbytes: int) -> None:
    experts = np.random.default_rng(1).integers(0, 256, (nbytes, 1), np.uint8)
    entry = sample_entry("some-rollout", "some-call").model_copy(update={"routed_experts": experts})
    encoded = encode(entry, max_record_bytes=2**26)
    record, raw = msgpack.unpackb(encoded.record), experts.tobytes()
    parts = [raw[at : at + 2**20] for at in range(0, nbytes, 2**20)] if nbytes > 2**20 else []
    assert encoded.parts == [(xxhash.xxh3_128_digest(part), part) for part in parts]
    assert record["x"] == ["nested", "u1", [nbytes, 1], [name for name, _ in encoded.parts] or raw]
    assert encoded.seal[:32] == digest_by_the_page(record, "some-rollout", "some-call")


def test_a_refusal_and_its_digest_are_as_the_page_says() -> None:
    details = {"retry_after": 3, "why": "é"}
    stored = codec.encode_refusal("some-rollout", "some-call", "full", details)
    head = canonical_json(["some-rollout", "some-call", "full"])
    assert stored[32:] == msgpack.packb(details)
    assert stored[:32] == hashlib.blake2b(head + stored[32:], digest_size=32).digest()
