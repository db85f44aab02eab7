"""A staged call is stored as the page of the wire format says, read by nothing but that page."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash

pytest.importorskip("nemo_gym.token_id_capture.staging", reason="staging is a part of NeMo Gym's capture")

from support.backends import Place, place_of
from support.sequences import random_ids
from support.staged_calls import staged_record
from support.stored_state import WORDS

from gym_capture_redis import RedisStagingSink

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
PART_BYTES = 2**20
ATTACHMENTS: dict[str, Any] = {
    "b": np.arange(6, dtype=">i2").reshape(2, 3).T,
    "a": {"raw": b"\1\2", "text": "é"},
    "big": np.random.default_rng(0).integers(0, 256, PART_BYTES, dtype="u1"),
}
EXTRAS = {"routed_experts": [[[1, 2]], [[3, 300]]], "note": None}


@pytest.fixture(params=["valkey9", "redis7"])
def place(request: pytest.FixtureRequest, namespace: str) -> Any:
    with place_of(request, namespace) as found:
        yield found


def stored_by(place: Place, namespace: str, record: Any, attachments: Any) -> dict[bytes, bytes]:
    with RedisStagingSink(place.url, namespace=namespace) as sink:
        sink.stage(record, attachments=attachments)
    fields: Any = place.redis.hgetall(f"gymcap:{{{namespace}/r}}:staged")
    return dict(fields)


def joined(fields: dict[bytes, bytes], names: list[bytes]) -> bytes:
    parts = [fields[b"b:" + name] for name in names]
    for name, part in zip(names, parts, strict=True):
        assert xxhash.xxh3_128_digest(part) == name
    assert all(len(part) == PART_BYTES for part in parts[:-1])
    return b"".join(parts)


def tree_by_the_page(raw: bytes) -> Any:
    at = 4 + int.from_bytes(raw[:4], "big")
    bodies = [raw[at:]]

    def body(code: int, data: bytes) -> Any:
        form = msgpack.unpackb(data)
        if code == 1:
            taken, bodies[0] = bodies[0][:form], bodies[0][form:]
            return taken
        kind, shape = form
        nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        taken, bodies[0] = bodies[0][:nbytes], bodies[0][nbytes:]
        return np.frombuffer(taken, kind).reshape(shape)

    tree = msgpack.unpackb(raw[4:at], ext_hook=body)
    assert bodies == [b""]
    return tree


def seal_by_the_page(stored: bytes) -> bytes:
    record = msgpack.unpackb(stored)
    assert list(record) == ["v", "f", "t", "m", "l", "a", "x"]
    name = msgpack.packb(["r", "c"])
    without_extras = msgpack.packb({key: value for key, value in record.items() if key != "x"})
    digest = hashlib.blake2b(name + without_extras, digest_size=32).digest()
    return digest + xxhash.xxh3_128_digest(name + digest + stored)


def test_record_extras_and_attachments_are_as_the_page_says(place: Place, namespace: str) -> None:
    record = staged_record(ids=random_ids(11), generated=[5, 6, 7], extras=EXTRAS)
    fields = stored_by(place, namespace, record, ATTACHMENTS)
    stored = fields[b"r:c"]
    assert fields[b"c:c"] == b"r" + seal_by_the_page(stored)
    content = msgpack.unpackb(stored)
    elsewhere = {"rollout_id", "model_call_id", "extras"} | {
        name for name in record.__dict__ if "_delta" in name
    }
    expected = {name: value for name, value in record.model_dump().items() if name not in elsewhere}
    assert content["v"] == 1
    assert list(content["f"]) == sorted(expected)
    assert content["f"] == expected
    kind, raw = content["t"]
    assert kind == "u3"
    ids = [int.from_bytes(raw[at : at + 3], "little") for at in range(0, len(raw), 3)]
    assert ids == record.token_ids_delta
    kind, raw = content["m"]
    assert kind == "bits"
    bits = [float(raw[number // 8] >> (7 - number % 8) & 1) for number in range(len(ids))]
    assert bits == record.token_mask_delta
    kind, raw = content["l"]
    values = iter(np.frombuffer(raw, f"<{kind}").tolist())
    assert [next(values) if bit else 0.0 for bit in bits] == record.generation_log_probs_delta

    extras = msgpack.unpackb(joined(fields, content["x"]))
    assert list(extras) == ["note", "routed_experts"]
    assert extras["note"] is None
    form, kind, shape, raw = extras["routed_experts"]
    assert form == "nested"
    assert np.frombuffer(raw, f"<{kind}").reshape(shape).tolist() == EXTRAS["routed_experts"]

    tree = tree_by_the_page(joined(fields, content["a"]))
    assert len(content["a"]) == 2
    assert list(tree) == ["a", "b", "big"]
    assert tree["a"] == ATTACHMENTS["a"]
    for name in ("b", "big"):
        assert tree[name].dtype == ATTACHMENTS[name].dtype
        assert (tree[name] == ATTACHMENTS[name]).all()

    state = dict(zip(WORDS, fields[b"s"].split(b" "), strict=False))
    assert (state["status"], state["records"], state["blocks"], state["ids"]) == (b"open", b"1", b"3", b"14")
    assert fields[b"s"].endswith(b" "), "no ends"
    traces = {fields[name][-2:] for name in fields if name.startswith(b"o:")}
    assert traces == {b"p:", b":c"}


def test_zeros_with_a_sign_are_stored_as_the_page_says(place: Place, namespace: str) -> None:
    from support.conversations import gym

    dumped = staged_record(ids=[1, 2]).model_dump(exclude={"extras"})
    dumped["generation_log_probs_delta"][0] = -0.0
    dumped["digest"] = gym("staging.digest", "compute_staging_digest")(
        **{name: value for name, value in dumped.items() if name != "digest"}
    )
    record = gym("staging.records", "StagedCallRecord")(**dumped)
    fields = stored_by(place, namespace, record, None)
    content = msgpack.unpackb(fields[b"r:c"])
    assert fields[b"c:c"] == b"r" + seal_by_the_page(fields[b"r:c"])
    assert content["x"] is content["a"] is None
    for key, name in (("m", "token_mask_delta"), ("l", "generation_log_probs_delta")):
        kind, raw = content[key]
        assert repr(np.frombuffer(raw, f"<{kind}").tolist()) == repr(getattr(record, name))


def test_the_page_gives_the_key_and_the_fields_of_a_record() -> None:
    section = PAGE.partition("## Staged calls")[2].partition("\n## ")[0]
    assert "`gymcap:{<namespace>/<rollout_id>}:staged`" in section
    rows = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows == ["v", "f", "t", "m", "l", "a", "x"]
