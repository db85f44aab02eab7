"""What inference workers stage is stored whole or not at all, and comes back as it was, checked."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nemo_gym.token_id_capture.staging", reason="staging is a part of NeMo Gym's capture")

from support.backends import Place
from support.cluster import ClusterGroup
from support.conversations import gym
from support.polling import wait_until
from support.processes import stage_from_a_process
from support.sentinel import SentinelGroup
from support.sequences import random_ids
from support.servers import RealServer
from support.staged_calls import (
    CaptureAdmission,
    RolloutTokenCapture,
    admission_of,
    base_of,
    staged_chain,
    staged_record,
)

from gym_capture_redis import (
    RedisStagingSink,
    RedisStagingSource,
    RedisTokenSink,
    RedisTokenSource,
    scripts,
)
from gym_capture_redis.batches import MAX_BATCH_CALLS
from gym_capture_redis.errors import (
    BackendUnavailableError,
    CallConflictError,
    CaptureError,
    ConfigurationError,
    CorruptRecordError,
    DurabilityError,
    InvalidIdentifierError,
    InvalidRecordError,
    RecordTooLargeError,
    StagedCallMissingError,
    TokenCaptureRetiredError,
    UnsupportedFormatError,
)
from gym_capture_redis.keys import rollout_key, staged_key
from gym_capture_redis.scripts import Call, Reply, Step
from gym_capture_redis.subject import Subject
from gym_capture_redis.turns import Job, Turns

MIB = 2**20
THREADS = 16

ATTACHMENTS: dict[str, Any] = {
    "pixel_values": np.arange(60, dtype="f4").reshape(3, 4, 5)[:, ::2],
    "nested": {"grid": np.array([[1, 2, 3]]), "raw": b"\x00\xff", "deep": {"empty": np.zeros((0, 3), "f2")}},
    "text": "é",
    "none": None,
    "list": [1, 2.5, True, b"x"],
}
EXTRAS: dict[str, Any] = {
    "routed_experts": [[[1, 300]], [[3, 4]], [[0, 7]]],
    "note": {"b": 1, "a": [None, -0.0]},
}


class Staging:
    """Sinks and sources of one namespace, as workers and trainers have them."""

    def __init__(self, url: str, namespace: str, **settings: Any) -> None:
        self.url, self.settings = url, {"namespace": namespace} | settings
        self._made: list[Any] = []
        self.sink, self.source = self.new_sink(), self.new_source()

    def new_sink(self, **settings: Any) -> RedisStagingSink:
        self._made.append(RedisStagingSink(self.url, **self.settings | settings))
        return self._made[-1]  # type: ignore[no-any-return]

    def new_source(self, **settings: Any) -> RedisStagingSource:
        self._made.append(RedisStagingSource(self.url, **self.settings | settings))
        return self._made[-1]  # type: ignore[no-any-return]

    def close(self) -> None:
        for each in self._made:
            each.close()


@pytest.fixture
def staging(place: Place, namespace: str) -> Iterator[Staging]:
    staging = Staging(place.url, namespace, durability=place.durability)
    yield staging
    staging.close()


@pytest.fixture
def on_valkey(valkey9: RealServer, namespace: str) -> Iterator[Staging]:
    staging = Staging(valkey9.url, namespace)
    yield staging
    staging.close()


class Watched:
    """Notes the steps of a client, and what they were answered."""

    def __init__(self, client: Any) -> None:
        self.trips: list[list[tuple[Call, Reply]]] = []
        run = client._client.run_joined

        def watched(calls: list[Call], subject: Subject, *, deadline: float) -> list[Reply]:
            replies: list[Reply] = run(calls, subject, deadline=deadline)
            self.trips.append(list(zip(calls, replies, strict=True)))
            return replies

        client._client.run_joined = watched

    def take(self) -> list[list[tuple[Call, Reply]]]:
        taken, self.trips = self.trips, []
        return taken

    def fields_read(self) -> list[int]:
        """How many fields each of the reads since the last time has brought."""
        return [
            len(reply.rest[0])
            for trip in self.take()
            for call, reply in trip
            if call.step is Step.FIELDS and reply.code == "OK"
        ]

    def steps(self) -> list[list[str]]:
        return [[f"{call.step.value[0]} {reply.code}" for call, reply in trip] for trip in self.take()]


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def extras_digest(extras: Any) -> Any:
    return gym("staging.digest", "compute_extras_digest")(extras)


# What Gym asks for


class Everywhere:
    """What is the same on every kind of server, behind sentinels and in a Cluster."""

    def test_the_golden_vectors_keep_their_digests_through_the_store(self, staging: Staging) -> None:
        gym("staging.conformance", "assert_golden_vectors")()
        vectors = gym("staging.conformance", "load_golden_vectors")()
        record = gym("staging.records", "StagedCallRecord")(
            **vectors["staged_call"], digest=vectors["staged_call_digest"], extras=vectors["extras"]
        )
        result = staging.sink.stage(record)
        assert (result.ok, result.staging_key) == (True, "rollout-1/call-1")
        (snapshot,) = staging.source.fetch([result.staging_key])
        assert type(snapshot) is gym("staging.records", "StagedCallBaseSnapshot")
        assert snapshot.digest == vectors["staged_call_digest"]
        type(snapshot).model_validate(snapshot.model_dump())  # which computes the digest again
        extras = staging.source.fetch_extras(result.staging_key)
        assert extras == vectors["extras"]
        assert extras_digest(extras) == vectors["extras_digest"]
        assert staging.source.fetch_attachments(result.staging_key) is None

    def test_a_rollout_is_captured_turn_by_turn_and_rebuilt(self, staging: Staging) -> None:
        weights = iter(range(100))
        capture = RolloutTokenCapture(sink=staging.sink, weight_version_fn=lambda: next(weights))
        committed: list[Any] = []
        extras: list[Any] = []
        ids: list[int] = []
        for number in range(6):
            parent = committed[-1] if committed else None
            chain = [coords.staging_key for coords in committed]
            admission = admission_of("r", f"c{number}", parent, chain)
            prefix = staging.source.resolve_prefix(admission)
            assert prefix == ids
            prompt, generated = prefix + random_ids(300, number), random_ids(20, 100 + number)
            extras.append(
                {"routed_experts": [[[number, token % 300]] for token in range(20)]} if number % 2 else None
            )
            coords = capture.complete_call(
                capture.begin_call(admission, prefix_token_ids=prefix or None),
                prompt_token_ids=prompt,
                generated_token_ids=generated,
                generated_logprobs=[float(np.float32(-0.1 * n)) for n in range(20)],
                extras=extras[-1],
                attachments=ATTACHMENTS if number == 3 else None,
            )
            assert coords.disposition == "staged", "a record was refused"
            committed.append(coords)
            ids = prompt + generated
        manifest = [
            gym("staging.records", "CallRecord")(
                **coords.model_dump(exclude={"rollout_id", "disposition"}),
                mode="token_in" if coords.parent_call_id else "text",
                response_id=f"response of {coords.model_call_id}",
            )
            for coords in committed
        ]
        snapshots = staging.source.fetch([record.staging_key for record in manifest])
        row = gym("staging.rebuild", "linearize")("r", snapshots, manifest, terminal_hint="c5")
        assert row.token_ids == ids
        assert row.weight_versions == list(range(6))
        for record, commitment, expected in zip(manifest, row.extras_commitments, extras, strict=True):
            fetched = staging.source.fetch_extras(record.staging_key)
            assert fetched == expected
            assert extras_digest(fetched) == commitment.extras_digest
        attached = [staging.source.fetch_attachments(record.staging_key) for record in manifest]
        assert same_bits(attached[3], ATTACHMENTS | {"pixel_values": ATTACHMENTS["pixel_values"].copy()})
        assert attached[:3] + attached[4:] == [None] * 5

    def test_one_row_comes_for_each_key_in_order(self, staging: Staging) -> None:
        records = {
            f"{rollout}/{call}": staged_record(rollout, call)
            for rollout in ("r0", "r1", "r2")
            for call in ("a", "b", "with/slash", "é")
        }
        for record in records.values():
            staging.sink.stage(record)
        keys = [*reversed(records), "r1/b", "r0/a", "r0/a"]
        assert [base_of(row) for row in staging.source.fetch(keys)] == [base_of(records[key]) for key in keys]
        assert staging.source.fetch([]) == []

    def test_rollouts_are_removed_whole_and_their_ids_can_be_used_again(self, staging: Staging) -> None:
        for rollout in ("r0", "r1", "r2"):
            staging.sink.stage(staged_record(rollout), attachments={"x": bytes(2 * MIB)})
        ended = staging.source.delete(["r0", "absent", "r1", "r0"])
        assert ended == {"removed": ["r0", "r1"], "absent": ["absent"]}
        assert staging.source.delete(["r0"]) == {"removed": [], "absent": ["r0"]}
        for rollout in ("r0", "r1"):
            with pytest.raises(StagedCallMissingError):
                staging.source.fetch([f"{rollout}/c"])
        assert len(staging.source.fetch(["r2/c"])) == 1
        # The sink knows parts of the attempt that is gone.
        staging.sink.stage(staged_record("r0", ids=[9]), attachments={"x": bytes(2 * MIB)})
        assert staging.source.fetch_attachments("r0/c") == {"x": bytes(2 * MIB)}

    def test_a_retired_rollout_is_gone_and_refuses_late_calls_until_it_is_deleted(
        self, staging: Staging
    ) -> None:
        staging.sink.stage(staged_record())
        assert staging.source.retire(["r", "unknown"]) == {"removed": ["r"], "absent": ["unknown"]}
        assert staging.source.retire(["r"]) == {"removed": [], "absent": ["r"]}
        for rollout in ("r", "unknown"):
            with pytest.raises(StagedCallMissingError):
                staging.source.fetch([f"{rollout}/c"])
            for sink in (staging.sink, staging.new_sink()):
                with pytest.raises(TokenCaptureRetiredError, match=f"call 'c' of rollout {rollout}"):
                    sink.stage(staged_record(rollout))
        staging.source.delete(["r"])
        assert staging.sink.stage(staged_record()).ok


class TestOnOneServer(Everywhere):
    pass


class TestBehindSentinels(Everywhere):
    @pytest.fixture
    def staging(self, sentinel_group: SentinelGroup, namespace: str) -> Iterator[Staging]:
        staging = Staging(sentinel_group.url, namespace)
        yield staging
        staging.close()


class TestInACluster(Everywhere):
    @pytest.fixture
    def staging(self, cluster_group: ClusterGroup, namespace: str) -> Iterator[Staging]:
        staging = Staging(cluster_group.url, namespace)
        yield staging
        staging.close()


def test_gyms_protocols_are_kept(on_valkey: Staging) -> None:
    assert isinstance(on_valkey.sink, gym("staging.protocols", "StagingSink"))
    assert isinstance(on_valkey.source, gym("staging.protocols", "StagingSource"))


def test_a_refused_call_is_a_failed_capture_and_not_an_error_of_the_model_call(on_valkey: Staging) -> None:
    capture = RolloutTokenCapture(sink=on_valkey.sink, weight_version_fn=lambda: 0)
    coords = capture.complete_call(
        capture.begin_call(admission_of("r", "c")),
        prompt_token_ids=[1],
        generated_token_ids=[2],
        generated_logprobs=[-0.5],
        attachments={"tensor": object()},
    )
    assert coords.disposition == "capture_failed"
    with pytest.raises(KeyError):
        on_valkey.source.fetch(["r/c"])


# What is stored


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ids": []},
        {"ids": random_ids(700, below=2**63), "log_probs": [-1e-30, -0.1]},
        {"ids": random_ids(5, below=2**16), "log_probs": [-0.0, 0.0], "extras": {}},
        {"log_probs": [float(np.float32(-0.1)), -5.0], "extras": EXTRAS},
    ],
    ids=["plain", "no prompt", "wide", "signed zeros", "narrow"],
)
def test_a_record_comes_back_to_the_last_bit(staging: Staging, fields: dict[str, Any]) -> None:
    record = staged_record(**fields)
    staging.sink.stage(record)
    (snapshot,) = staging.source.fetch(["r/c"])
    assert base_of(snapshot) == base_of(record)
    assert same_bits(staging.source.fetch_extras("r/c"), record.extras)


def test_zeros_with_a_sign_where_nothing_was_generated_come_back_with_it(staging: Staging) -> None:
    digest = gym("staging.digest", "compute_staging_digest")
    fields = {
        name: value for name, value in staged_record(ids=[1, 2, 3]).model_dump().items() if name != "extras"
    }
    fields["token_mask_delta"][1] = -0.0
    fields["generation_log_probs_delta"][0] = -0.0
    fields["digest"] = digest(**{name: value for name, value in fields.items() if name != "digest"})
    record = gym("staging.records", "StagedCallRecord")(**fields)
    staging.sink.stage(record)
    (snapshot,) = staging.source.fetch(["r/c"])
    assert base_of(snapshot) == base_of(record)
    type(snapshot).model_validate(snapshot.model_dump())


@pytest.mark.parametrize("nbytes", [0, 1, MIB, MIB + 1, 9 * MIB + 5])
def test_attachments_of_every_size_come_back(staging: Staging, nbytes: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, nbytes, dtype="u1")
    attachments = {"array": noise, "raw": noise.tobytes(), "zeros": np.zeros(nbytes, "i2")}
    staging.sink.stage(staged_record(extras=EXTRAS), attachments=attachments)
    assert same_bits(staging.source.fetch_attachments("r/c"), attachments)
    assert staging.source.fetch_extras("r/c") == EXTRAS


def test_no_attachments_and_an_empty_mapping_of_them_are_told_apart(staging: Staging) -> None:
    staging.sink.stage(staged_record(call="none"))
    staging.sink.stage(staged_record(call="empty"), attachments={})
    assert staging.source.fetch_attachments("r/none") is None
    assert staging.source.fetch_attachments("r/empty") == {}


def test_reading_records_brings_neither_extras_nor_attachments(on_valkey: Staging) -> None:
    extras = {"routed_experts": "nrlre1:int8:" + "A" * 2 * MIB}
    on_valkey.sink.stage(staged_record(extras=extras), attachments={"x": bytes(2 * MIB)})
    watched = Watched(on_valkey.source)
    on_valkey.source.fetch(["r/c"])
    ((trip,),) = watched.take()
    assert sum(map(len, trip[1].rest[0])) < 1_500
    assert on_valkey.source.fetch_extras("r/c") == extras
    assert watched.fields_read() == [2, 1, 1, 1], "row and record, then a part at a time, and no attachment"


def test_equal_parts_are_sent_once(on_valkey: Staging) -> None:
    image = np.random.default_rng(2).integers(0, 256, 3 * MIB, dtype="u1").tobytes()
    watched = Watched(on_valkey.sink)
    on_valkey.sink.stage(staged_record(call="c0"), attachments={"image": image})
    assert watched.steps() == [["join OK"], [*["stage OK"] * 4, "put OK"]]
    on_valkey.sink.stage(staged_record(call="c1"), attachments={"image": image})
    assert watched.steps() == [["put OK"]]
    assert on_valkey.source.fetch_attachments("r/c1") == {"image": image}


def test_staged_calls_and_captured_ones_do_not_meet(valkey9: RealServer, on_valkey: Staging) -> None:
    import asyncio

    async def capture_the_same_call() -> None:
        async with RedisTokenSink(valkey9.url, **on_valkey.settings) as sink:
            await sink.begin_call("r", "c")
            await sink.record_engine_refusal("r", model_call_id="c", code="too-long")
        async with RedisTokenSource(valkey9.url, **on_valkey.settings, settle_s=0.001) as source:
            snapshot = await source.freeze("r")
            assert not snapshot.incomplete, snapshot.reasons
            assert snapshot.entries == ()
            await source.retire(["r"])

    on_valkey.sink.stage(staged_record())
    asyncio.run(capture_the_same_call())
    assert len(on_valkey.source.fetch(["r/c"])) == 1
    on_valkey.sink.stage(staged_record(call="later"))
    with valkey9.client() as client:
        captured, staged = (
            rollout_key(on_valkey.settings["namespace"], "r"),
            staged_key(on_valkey.settings["namespace"], "r"),
        )
        assert client.exists(captured) == client.exists(staged) == 1


# What is refused


@pytest.mark.parametrize("again", ["same sink", "other sink"])
def test_staging_the_same_again_does_nothing(
    place: Place, staging: Staging, namespace: str, again: str
) -> None:
    record = staged_record(extras=EXTRAS)
    first = staging.sink.stage(record, attachments=ATTACHMENTS)
    before: Any = place.redis.hgetall(staged_key(namespace, "r"))
    sink = staging.sink if again == "same sink" else staging.new_sink()
    turned = dict(reversed(ATTACHMENTS.items()))
    assert sink.stage(record.model_copy(deep=True), attachments=turned) == first
    assert place.redis.hgetall(staged_key(namespace, "r")) == before


@pytest.mark.parametrize(
    ("record", "attachments"),
    [
        (staged_record(ids=[1]), ATTACHMENTS),
        (staged_record(extras={"x": 1}), ATTACHMENTS),
        (staged_record(extras={}), ATTACHMENTS),
        (staged_record(log_probs=[-0.1, -0.25 - 1e-12]), ATTACHMENTS),
        (staged_record(), None),
        (staged_record(), {}),
        (staged_record(), ATTACHMENTS | {"more": b""}),
        (staged_record(), ATTACHMENTS | {"pixel_values": np.zeros((3, 2, 5), "f4")}),
    ],
    ids=["ids", "extras", "empty extras", "a bit", "none", "empty", "more", "another array"],
)
def test_other_content_for_the_same_call_is_a_conflict_and_the_first_stays(
    staging: Staging, record: Any, attachments: Any
) -> None:
    first = staged_record(log_probs=[-0.1, -0.25] if record.generation_log_probs_delta[-1] < -0.25 else None)
    assert (
        record.digest == first.digest or record.extras_digest != first.extras_digest or record.delta_len == 3
    )
    staging.sink.stage(first, attachments=ATTACHMENTS)
    for sink in (staging.sink, staging.new_sink()):
        with pytest.raises(
            CallConflictError, match=r"staged before, with other content.*call 'c' of rollout r"
        ):
            sink.stage(record, attachments=attachments)
    (snapshot,) = staging.source.fetch(["r/c"])
    assert base_of(snapshot) == base_of(first)
    assert staging.source.fetch_attachments("r/c") is not None
    assert staging.sink.stage(first, attachments=ATTACHMENTS).ok


def changed(**fields: Any) -> Any:
    record = staged_record()
    for name, value in fields.items():
        record.__dict__[name] = value
    return record


@pytest.mark.parametrize(
    ("record", "attachments", "error", "said"),
    [
        (
            changed(token_ids_delta=[1, 2, 3]),
            None,
            InvalidRecordError,
            "digest does not match.*call 'c' of rollout r",
        ),
        (changed(generation_log_probs_delta=[0.0, 0.0, float("nan")]), None, InvalidRecordError, "call 'c'"),
        (changed(extras={"x": 1}), None, InvalidRecordError, "extras_digest does not match extras"),
        (changed(schema_version=99), None, InvalidRecordError, "schema_version"),
        (changed(rollout_id="a/b"), None, InvalidIdentifierError, "rollout id 'a/b' is refused"),
        (changed(model_call_id="c" * 2_000), None, InvalidIdentifierError, "it has 2000 bytes"),
        (
            {"rollout_id": "r"},
            None,
            InvalidRecordError,
            "a StagedCallRecord can be staged, nothing of type dict",
        ),
        (staged_record(ids=[2**63]), None, InvalidRecordError, "outside 0 to 2.*63 - 1"),
        (staged_record(), [b"x"], InvalidRecordError, "attachments must be a mapping, not of type list"),
        (
            staged_record(),
            {"x": np.array([None])},
            InvalidRecordError,
            r"attachments\['x'\] is refused.*call 'c'",
        ),
        (
            staged_record(),
            {"x": bytes(3 * MIB)},
            RecordTooLargeError,
            "the limit max_record_bytes is 3145728",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_network(
    record: Any, attachments: Any, error: type[Exception], said: str
) -> None:
    sink = RedisStagingSink("redis://nowhere.invalid/0", max_record_bytes=3 * MIB)
    with pytest.raises(error, match=said) as refused:
        sink.stage(record, attachments=attachments)
    assert type(refused.value) is error


def test_no_message_holds_token_data() -> None:
    record = changed(token_ids_delta=[1, 987654321, -987654321])
    with pytest.raises(InvalidRecordError) as refused:
        RedisStagingSink("redis://nowhere.invalid/0").stage(record)
    assert "987654321" not in str(refused.value)
    record = changed(generation_log_probs_delta=[0.0, 0.0, 9.87654321e300])
    with pytest.raises(InvalidRecordError) as refused:
        RedisStagingSink("redis://nowhere.invalid/0").stage(record)
    assert "9.87654321" not in str(refused.value)


# What is fetched


@pytest.mark.parametrize("missing", ["r/no", "other/c", "no-slash", "", "a b/c", "r/", 5])
def test_the_first_key_that_is_missing_is_named(staging: Staging, missing: Any) -> None:
    staging.sink.stage(staged_record())
    for keys in (["r/c", missing, "r/later", "other/later"], [missing], [missing, "r/c"]):
        with pytest.raises(KeyError) as raised:
            staging.source.fetch(keys)
        assert isinstance(raised.value, StagedCallMissingError)
        assert isinstance(raised.value, CaptureError)
        assert raised.value.staging_key == str(missing)
        assert f"nothing is staged under {missing!r}: " in str(raised.value)
        is_key = missing in ("r/no", "other/c")
        assert ("a key is '<rollout>/<call>'" in str(raised.value)) is not is_key
    for fetch in (staging.source.fetch_extras, staging.source.fetch_attachments):
        with pytest.raises(StagedCallMissingError):
            fetch(missing)


def test_a_bare_string_is_not_several_keys(staging: Staging) -> None:
    with pytest.raises(TypeError, match="several keys, not one str"):
        staging.source.fetch("r/c")


def test_many_and_long_records_are_read_in_pages(on_valkey: Staging) -> None:
    keys = []
    for number in range(40):
        record = staged_record(call=f"c{number}", ids=random_ids(1_000, number))
        keys.append(on_valkey.sink.stage(record).staging_key)
    source = on_valkey.new_source(chunk_bytes=20_000)
    watched = Watched(source)
    assert [row.model_call_id for row in source.fetch(keys)] == [f"c{number}" for number in range(40)]
    assert len(watched.take()) > 3


# Chains


def chain_admission(records: list[Any], **changes: Any) -> Any:
    """How the call after these is admitted."""
    fields = {
        "rollout_id": records[-1].rollout_id,
        "model_call_id": "next",
        "mode": "token_in",
        "parent_call_id": records[-1].model_call_id,
        "prev_len": records[-1].cum_len,
        "staging_chain": [record.staging_key for record in records],
        "parent_chain_hash": records[-1].chain_hash,
    }
    return CaptureAdmission(**fields | changes)


def ids_of(records: list[Any]) -> list[int]:
    return [token for record in records for token in record.token_ids_delta]


def test_only_the_end_of_a_chain_that_is_missing_is_fetched(on_valkey: Staging) -> None:
    records = list(staged_chain("r", 12))
    watched = Watched(on_valkey.source)
    for number, record in enumerate(records, 1):
        on_valkey.sink.stage(record)
        assert on_valkey.source.resolve_prefix(chain_admission(records[:number])) == ids_of(records[:number])
        assert watched.fields_read() == [2], "one row and its record"
    assert on_valkey.source.resolve_prefix(chain_admission(records)) == ids_of(records)
    assert watched.take() == [], "nothing new"
    cold = on_valkey.new_source()
    watched = Watched(cold)
    assert cold.resolve_prefix(chain_admission(records)) == ids_of(records)
    assert watched.fields_read() == [24], "all in one round trip"


def test_branches_share_what_they_have_in_common(on_valkey: Staging) -> None:
    records = list(staged_chain("r", 6))
    for record in records:
        on_valkey.sink.stage(record)
    on_valkey.source.resolve_prefix(chain_admission(records))
    watched = Watched(on_valkey.source)
    assert on_valkey.source.resolve_prefix(chain_admission(records[:3])) == ids_of(records[:3])
    assert watched.take() == []


def test_a_small_cache_costs_reads_and_nothing_else(on_valkey: Staging) -> None:
    records = list(staged_chain("r", 5, new_ids=2_000))
    source = on_valkey.new_source(prefix_cache_bytes=25_000)
    for number, record in enumerate(records, 1):
        on_valkey.sink.stage(record)
        assert source.resolve_prefix(chain_admission(records[:number])) == ids_of(records[:number])
    assert source._chains._own.nbytes <= 25_000
    assert source._chains._own.links, "it keeps something"


def test_what_another_attempt_has_staged_is_not_taken_for_what_is_remembered(staging: Staging) -> None:
    for seed in (0, 100):
        records = list(staged_chain("r", 4, seed=seed))
        for number, record in enumerate(records, 1):
            staging.sink.stage(record)
            admission = chain_admission(records[:number])
            assert staging.source.resolve_prefix(admission) == ids_of(records[:number])
        staging.source.delete(["r"])


def test_a_link_that_is_remembered_follows_no_other_link_than_its_own(staging: Staging) -> None:
    old, new = list(staged_chain("r", 2)), list(staged_chain("r", 2, seed=100))
    for record in old:
        staging.sink.stage(record)
    assert staging.source.resolve_prefix(chain_admission(old)) == ids_of(old)
    staging.source.delete(["r"])
    staging.sink.stage(new[0])
    # Only its end is left in the cache, and is the end that is admitted.
    del staging.source._chains._own.links["r/c0"]
    with pytest.raises(StagedCallMissingError, match="'r/c1'"):
        staging.source.resolve_prefix(chain_admission(old))


@pytest.mark.parametrize(
    "changes",
    [{"parent_chain_hash": "0" * 64}, {"prev_len": 7}, {"staging_chain": ["r/c0", "r/c2"]}],
    ids=["another hash", "another length", "a hole"],
)
def test_a_chain_that_does_not_give_the_admitted_prefix_is_an_error(
    staging: Staging, changes: dict[str, Any]
) -> None:
    records = list(staged_chain("r", 3))
    for record in records:
        staging.sink.stage(record)
    for source in (staging.source, staging.new_source()):
        with pytest.raises(CorruptRecordError, match=r"does not give the prefix.*call 'next' of rollout r"):
            source.resolve_prefix(chain_admission(records, **changes))
        assert source.resolve_prefix(chain_admission(records)) == ids_of(records)


def test_a_chain_with_a_call_that_is_not_there_names_it(staging: Staging) -> None:
    records = list(staged_chain("r", 3))
    staging.sink.stage(records[0])
    staging.sink.stage(records[2])
    with pytest.raises(StagedCallMissingError, match="'r/c1'"):
        staging.source.resolve_prefix(chain_admission(records))


def test_a_prefix_that_comes_with_the_admission_needs_no_server() -> None:
    source = RedisStagingSource("redis://nowhere.invalid/0")
    records = list(staged_chain("r", 2))
    inline = chain_admission(records, staging_chain=[], required_prefix_token_ids=ids_of(records))
    assert source.resolve_prefix(inline) == ids_of(records)
    assert source.resolve_prefix(admission_of("r", "root")) == []


# Removal


@pytest.mark.parametrize("how", ["retire", "delete"])
def test_a_batch_with_a_malformed_id_touches_nothing(staging: Staging, how: str) -> None:
    staging.sink.stage(staged_record())
    with pytest.raises(InvalidIdentifierError):
        getattr(staging.source, how)(["r", "a/b"])
    with pytest.raises(TypeError, match="several ids, not one str"):
        getattr(staging.source, how)("r")
    assert len(staging.source.fetch(["r/c"])) == 1


def test_an_attempt_that_ends_between_two_reads_is_not_mixed_with_the_next(on_valkey: Staging) -> None:
    first, second = staged_record(call="c0"), staged_record(call="c1")
    for record in (first, second):
        on_valkey.sink.stage(record)
    source = on_valkey.new_source(chunk_bytes=1)
    run, reads = source._client.run_joined, []

    def begun_anew_after_the_third(calls: Any, subject: Any, *, deadline: float) -> Any:
        reads.append(calls)
        if len(reads) == 3:
            on_valkey.source.delete(["r"])
            on_valkey.sink.stage(staged_record(call="c1", ids=[1, 2]))
        return run(calls, subject, deadline=deadline)

    source._client.run_joined = begun_anew_after_the_third  # type: ignore[method-assign]
    with pytest.raises(StagedCallMissingError, match="'r/c0'"):
        source.fetch(["r/c0", "r/c1"])
    assert len(reads) == 3


def test_a_call_that_is_removed_while_its_parts_are_read_is_missing_and_not_damaged(
    on_valkey: Staging,
) -> None:
    on_valkey.sink.stage(staged_record(extras=EXTRAS))
    source = on_valkey.new_source()
    run, reads = source._client.run_joined, []

    def removed_before_the_second(calls: Any, subject: Any, *, deadline: float) -> Any:
        reads.append(calls)
        if len(reads) == 2:
            on_valkey.source.delete(["r"])
        return run(calls, subject, deadline=deadline)

    source._client.run_joined = removed_before_the_second  # type: ignore[method-assign]
    with pytest.raises(StagedCallMissingError, match="'r/c'"):
        source.fetch_extras("r/c")


def test_a_late_duplicate_of_a_delete_does_not_touch_the_next_attempt(on_valkey: Staging) -> None:
    on_valkey.sink.stage(staged_record())
    watched = Watched(on_valkey.source)
    on_valkey.source.delete(["r"])
    late = watched.take()[-1][0][0]
    assert late.step is Step.DELETE
    on_valkey.sink.stage(staged_record(ids=[5]))
    (reply,) = on_valkey.source._client.run_joined(
        [late], Subject("r"), deadline=on_valkey.source._client.deadline()
    )
    assert reply.code == "CHANGED"
    assert len(on_valkey.source.fetch(["r/c"])) == 1


def test_a_read_of_another_attempt_is_told_and_changes_nothing(
    place: Place, staging: Staging, namespace: str
) -> None:
    staging.sink.stage(staged_record(), attachments=ATTACHMENTS)
    key = staged_key(namespace, "r")
    before: Any = place.redis.hgetall(key)
    client = staging.source._client
    for incarnation, key_of, code in (
        ("", key, "OK"),
        ("another", key, "RETIRED"),
        ("", staged_key(namespace, "no"), "ABSENT"),
    ):
        call = scripts.fields(
            key_of, [b"c:c", b"no", b"r:c"], incarnation=incarnation, max_bytes=MIB, reply_bytes=1
        )
        (reply,) = client.run_joined([call], Subject("r"), deadline=client.deadline())
        assert reply.code == code
        if code == "OK":
            assert reply.rest[0] == [before[b"c:c"], None, before[b"r:c"]]
    assert place.redis.hgetall(key) == before


# Threads and processes


def test_many_threads_get_their_own_answers(on_valkey: Staging) -> None:
    calls, met = 25, threading.Barrier(THREADS)

    def work(number: int) -> None:
        met.wait()
        for turn in range(calls):
            record = staged_record(f"r{number % 4}", f"{number}.{turn}", extras={"of": [number, turn]})
            key = on_valkey.sink.stage(record, attachments={"of": f"{number}.{turn}"}).staging_key
            (row,) = on_valkey.source.fetch([key])
            assert base_of(row) == base_of(record)
            assert on_valkey.source.fetch_extras(key) == {"of": [number, turn]}
            assert on_valkey.source.fetch_attachments(key) == {"of": f"{number}.{turn}"}

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(work, range(THREADS)))
    everything = [f"r{number % 4}/{number}.{turn}" for number in range(THREADS) for turn in range(calls)]
    assert len(on_valkey.source.fetch(everything)) == THREADS * calls


def test_what_many_threads_stage_at_once_shares_script_calls(one_server: RealServer, namespace: str) -> None:
    staging = Staging(one_server.url, namespace, connections=1)
    records = [staged_record(f"r{number}", "c") for number in range(3 * MAX_BATCH_CALLS + 8)]
    staging.sink.stage(staged_record("warm"))
    turns: Turns = staging.sink._client._servers[os.getpid()]._node._turns  # type: ignore[attr-defined]
    send, sizes = turns._send, []

    def watched(jobs: Sequence[Job]) -> None:
        sizes.append(len(jobs))
        send(jobs)

    turns._send = watched
    one_server.pause()
    with ThreadPoolExecutor(len(records)) as threads:
        staged = [threads.submit(staging.sink.stage, record) for record in records]
        wait_until(lambda: len(turns._waiting) == len(records) - 1, "all wait", timeout_s=30)
        one_server.resume()
        assert all(each.result().ok for each in staged)
    assert sizes[:4] == [1, *[MAX_BATCH_CALLS] * 3], "who comes later waits behind them"
    staging.close()


@pytest.mark.parametrize("kind", [RedisStagingSink, RedisStagingSource])
def test_a_client_is_made_where_it_is_used_and_not_sent_there(kind: type[Any]) -> None:
    with pytest.raises(TypeError, match=f"a {kind.__name__} cannot be pickled; make one where it is used"):
        pickle.dumps(kind("redis://server", namespace="run"))


def test_several_processes_stage_and_all_is_there(on_valkey: Staging) -> None:
    make_sink = partial(RedisStagingSink, on_valkey.url, **on_valkey.settings)
    pickle.loads(pickle.dumps(make_sink))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(3, mp_context=context) as processes:
        workers = [
            processes.submit(stage_from_a_process, make_sink, "r", f"w{number}", 20) for number in range(3)
        ]
        pids = {worker.result() for worker in workers}
    assert len(pids) == 3
    keys = [f"r/w{number}.{turn}" for number in range(3) for turn in range(20)]
    assert len(on_valkey.source.fetch(keys)) == 60


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_parent_and_child_go_on_after_a_fork_amid_other_threads_work(on_valkey: Staging) -> None:
    done = threading.Event()
    records = [staged_record("r", f"c{number}") for number in range(8)]
    chain = list(staged_chain("chain", 3))
    for record in chain:
        on_valkey.sink.stage(record)

    def work(record: Any) -> None:
        while not done.is_set():
            on_valkey.sink.stage(record)
            on_valkey.source.resolve_prefix(chain_admission(chain))

    def child() -> int:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                on_valkey.sink.stage(staged_record("r", f"child{os.getpid()}"))
                on_valkey.source.resolve_prefix(chain_admission(chain))
                status = 0
            finally:
                os._exit(status)
        return pid

    with ThreadPoolExecutor(8) as threads:
        working = [threads.submit(work, record) for record in records]
        children = [child() for _ in range(10)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        done.set()
        for each in working:
            each.result()
    assert set(statuses) == {0}
    assert len(on_valkey.source.fetch([f"r/child{pid}" for pid in children])) == 10


# Servers that fail


def test_a_server_that_does_not_answer_costs_the_deadline_and_no_more(
    one_server: RealServer, namespace: str
) -> None:
    staging = Staging(one_server.url, namespace, timeout_s=0.5)
    staging.sink.stage(staged_record())
    one_server.pause()
    calls = [
        partial(staging.sink.stage, staged_record(call="later")),
        partial(staging.source.fetch, ["r/c"]),
        partial(staging.source.fetch_attachments, "r/c"),
        partial(staging.source.delete, ["r"]),
    ]
    try:
        begun = time.monotonic()
        # More threads than turns: who waits for a turn has a deadline as well.
        with ThreadPoolExecutor(12) as threads:
            outcomes = [threads.submit(call) for call in calls * 3]
            for outcome in outcomes:
                with pytest.raises(BackendUnavailableError, match=r"within 0\.5 s.*rollout r"):
                    outcome.result(timeout=15)
        assert time.monotonic() - begun < 10
    finally:
        one_server.resume()
    assert len(staging.source.fetch(["r/c"])) == 1
    staging.close()


def test_a_server_that_is_killed_and_comes_back_has_all_that_was_acknowledged(
    server: RealServer, namespace: str
) -> None:
    staging = Staging(server.url, namespace)
    staged: list[str] = []
    done = threading.Event()

    def work(number: int) -> None:
        turn = 0
        while not done.is_set() or turn < 5:
            record = staged_record(f"r{number}", f"c{turn}", extras={"x": turn})
            staged.append(staging.sink.stage(record, attachments={"x": turn}).staging_key)
            turn += 1

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, number) for number in range(4)]
        while len(staged) < 20:
            time.sleep(0.001)
        server.wait_until_written()
        server.kill()
        server.start()
        done.set()
        for each in working:
            each.result()
    rows = staging.source.fetch(staged)
    assert [row.staging_key for row in rows] == staged
    for key in staged:
        assert staging.source.fetch_attachments(key) == staging.source.fetch_extras(key)
    staging.close()


def test_a_server_that_forgot_a_staged_call_does_not_look_whole(
    one_server: RealServer, namespace: str
) -> None:
    staging = Staging(one_server.url, namespace)
    records = list(staged_chain("r", 3))
    big = {"x": np.random.default_rng(3).bytes(2 * MIB)}
    for record in records[:2]:
        staging.sink.stage(record)
    one_server.wait_until_written()
    with one_server.client() as client:
        kept: Any = client.dump(staged_key(namespace, "r"))
        staging.sink.stage(records[2], attachments=big)
        client.restore(staged_key(namespace, "r"), 0, kept, replace=True)
    keys = [record.staging_key for record in records]
    with pytest.raises(StagedCallMissingError, match="'r/c2'"):
        staging.source.fetch(keys)
    # The sink believes that the parts are there, and is told that they are not.
    watched = Watched(staging.sink)
    staging.sink.stage(records[2], attachments=big)
    assert watched.steps()[0] == ["put MISSING"]
    assert len(staging.source.fetch(keys)) == 3
    assert staging.source.fetch_attachments("r/c2") == big
    staging.close()


def test_at_the_memory_limit_nothing_is_half_stored_and_removing_makes_room(
    server: RealServer, namespace: str
) -> None:
    staging = Staging(server.url, namespace, timeout_s=20)
    noise = np.random.default_rng(4)
    with server.client() as client:
        info: Any = client.info("memory")
        client.config_set("maxmemory", info["used_memory"] + 12 * MIB)
    staged, refused = [], []
    for number in range(8):
        record = staged_record(f"r{number}", extras={"x": "é" * 1_000})
        try:
            staged.append(staging.sink.stage(record, attachments={"x": noise.bytes(3 * MIB)}).staging_key)
        except BackendUnavailableError as error:
            refused.append((record.staging_key, str(error)))
    assert staged
    assert refused
    for key in staged:
        attached = staging.source.fetch_attachments(key)
        assert attached is not None
        assert len(attached["x"]) == 3 * MIB
        assert staging.source.fetch_extras(key) == {"x": "é" * 1_000}
    for key, why in refused:
        assert "out of memory and refused the write; nothing was stored" in why
        with pytest.raises(StagedCallMissingError):
            staging.source.fetch([key])
    rollouts = [f"r{number}" for number in range(8)]
    staging.source.delete(rollouts)
    assert staging.sink.stage(staged_record("r0"), attachments={"x": noise.bytes(3 * MIB)}).ok
    staging.close()


def test_steps_follow_a_slot_that_moves(cluster_group: ClusterGroup, namespace: str) -> None:
    staging = Staging(cluster_group.url, namespace)
    staging.sink.stage(staged_record())
    slot = cluster_group.slot_of(staged_key(namespace, "r"))
    assert slot == cluster_group.slot_of(rollout_key(namespace, "r"))
    source = cluster_group.node_of_slot(slot)
    target = next(node for node in cluster_group.primaries() if node is not source)
    during: list[str] = []

    def stage_meanwhile() -> None:
        record = staged_record(call=f"during{len(during)}")
        during.append(staging.sink.stage(record, attachments={"x": bytes(2 * MIB)}).staging_key)

    cluster_group.migrate_slot(slot, target, between=stage_meanwhile)
    assert during
    assert len(staging.source.fetch(["r/c", *during])) == 1 + len(during)
    assert staging.source.fetch_attachments(during[0]) == {"x": bytes(2 * MIB)}
    staging.close()


def test_calls_go_on_after_a_failover(sentinel_group: SentinelGroup, namespace: str) -> None:
    staging = Staging(sentinel_group.url, namespace, timeout_s=60, replicas=1)
    staging.sink.stage(staged_record(), attachments=ATTACHMENTS)
    sentinel_group.switch_over()
    assert staging.sink.stage(staged_record(call="after")).ok
    assert len(staging.source.fetch(["r/c", "r/after"])) == 2
    staging.close()


def test_what_replicas_do_not_confirm_is_an_error_that_says_so(
    sentinel_group: SentinelGroup, namespace: str
) -> None:
    staging = Staging(sentinel_group.url, namespace)
    sink = staging.new_sink(replicas=2, timeout_s=1.5)
    with pytest.raises(DurabilityError, match=r"call 'c' of rollout r.*replicas=2 was not confirmed"):
        sink.stage(staged_record())
    staging.close()


# Damage


def test_every_damaged_field_is_noticed(place: Place, staging: Staging, namespace: str) -> None:
    attachments = {"x": np.random.default_rng(5).bytes(MIB + 10)}
    staging.sink.stage(staged_record(extras=EXTRAS), attachments=attachments)
    key = staged_key(namespace, "r")
    fields: Any = place.redis.hgetall(key)
    names = [name for name in fields if name[:2] in (b"c:", b"r:", b"b:")]
    assert len(names) == 5

    def read_all() -> None:
        source = staging.new_source()
        source.fetch(["r/c"])
        source.fetch_extras("r/c")
        source.fetch_attachments("r/c")

    read_all()
    for name in names:
        value = fields[name]
        flipped = bytes([value[len(value) // 2] ^ 1])
        for damaged in (
            None,
            b"",
            value[:-1],
            value + b"x",
            value[: len(value) // 2] + flipped + value[len(value) // 2 + 1 :],
        ):
            if damaged is None:
                place.redis.hdel(key, name)
            else:
                place.redis.hset(key, name, damaged)
            with pytest.raises(CorruptRecordError, match="call 'c' of rollout r"):
                read_all()
        place.redis.hset(key, name, value)
    read_all()


def test_extras_are_compared_with_the_digest_of_gym(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_capture_redis.gym import staging as module

    staging.sink.stage(staged_record(extras={"x": 1}))
    staging.sink.stage(staged_record(call="none"))
    assert staging.source.fetch_extras("r/none") is None
    monkeypatch.setattr(module, "unpack_extras", lambda _: {"x": 2})
    with pytest.raises(CorruptRecordError, match=r"extras do not match their digest.*call 'c' of rollout r"):
        staging.source.fetch_extras("r/c")


def test_a_record_of_another_call_is_noticed(place: Place, staging: Staging, namespace: str) -> None:
    for call in ("c0", "c1"):
        staging.sink.stage(staged_record(call=call))
    key = staged_key(namespace, "r")
    for kind in ("c:", "r:"):
        other: Any = place.redis.hget(key, f"{kind}c0")
        place.redis.hset(key, f"{kind}c1", other)
    with pytest.raises(CorruptRecordError, match="call 'c1' of rollout r"):
        staging.source.fetch(["r/c0", "r/c1"])


def test_a_newer_format_is_refused_in_clear_words(
    place: Place, staging: Staging, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_capture_redis.gym import staged_codec

    with monkeypatch.context() as patched:
        patched.setattr(staged_codec, "STAGED_FORMAT", 2)
        staging.sink.stage(staged_record())
    with pytest.raises(UnsupportedFormatError, match=r"another version.*call 'c' of rollout r"):
        staging.source.fetch(["r/c"])
    place.redis.hset(staged_key(namespace, "r"), "s", "2 whatever comes")
    with pytest.raises(UnsupportedFormatError, match="format newer"):
        staging.source.fetch(["r/c"])


# Construction


@pytest.mark.parametrize("kind", [RedisStagingSink, RedisStagingSource])
def test_constructing_opens_nothing(kind: Any, namespace: str) -> None:
    threads = threading.active_count()
    settings: dict[str, Any] = {"tls": types.MappingProxyType({"check_hostname": False}), "password": "pw"}
    made = kind("rediss://nowhere.invalid/0", namespace=namespace, **settings)
    assert threading.active_count() == threads
    assert repr(made) == f"{kind.__name__}('rediss://nowhere.invalid:6379/0', namespace='{namespace}')"
    with made:
        pass
    made.close()


@pytest.mark.parametrize("kind", [RedisStagingSink, RedisStagingSource])
@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (
            {"max_inflight_bytes": MIB},
            ConfigurationError,
            "'max_inflight_bytes' is not a setting; the settings",
        ),
        ({"timeout_s": 0}, ConfigurationError, "setting 'timeout_s' is refused"),
        ({"namespace": "a/b"}, InvalidIdentifierError, "namespace 'a/b' is refused"),
        ({"url": 5}, ConfigurationError, "url must be a string"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    kind: Any, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        kind(**settings)


def test_nested_settings_may_be_omegaconfs() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="NeMo Gym reads YAML with it")
    settings = omegaconf.OmegaConf.create(
        {"url": "rediss://nowhere.invalid/0", "tls": {"check_hostname": False}}
    )
    for kind in (RedisStagingSink, RedisStagingSource):
        tls = kind(**settings)._settings.tls
        assert tls is not None
        assert tls.check_hostname is False


WITHOUT_GYM = """
import sys
sys.modules["nemo_gym"] = None
import gym_capture_redis
for name in ("RedisStagingSink", "RedisStagingSource"):
    try:
        getattr(gym_capture_redis, name)
    except ImportError as error:
        print(error)
"""


def test_without_gym_the_import_says_what_to_install() -> None:
    child = subprocess.run([sys.executable, "-c", WITHOUT_GYM], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    for line in child.stdout.splitlines():
        assert line == (
            "NeMo Gym is not installed; this part of gym-capture-redis needs `pip install 'nemo-gym>=0.7'` "
            "(--no-deps --ignore-requires-python where pip refuses this Python; see docs/nemo-gym.md)"
        )
    assert len(child.stdout.splitlines()) == 2
