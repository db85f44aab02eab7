"""What a record may hold: it comes back exactly as it was put, or it is refused (contract, section 2)."""

# ruff: noqa: D102 - a test's name is its sentence

from __future__ import annotations

import base64
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gym_capture_redis.testing.backend import TransportUnderTest, contents, exact, needs


def _bit_patterns(count: int, bits: int) -> list[int]:
    """Return numbers spread over all of ``bits`` bits, the same ones each time."""
    golden_ratio = 0x9E3779B97F4A7C15
    return [(number * golden_ratio % 2**64) >> (64 - bits) for number in range(1, count + 1)]


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if value - value == 0]


FLOAT64 = _finite([struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in _bit_patterns(2000, 64)])
FLOAT32 = _finite([struct.unpack("<f", struct.pack("<I", bits))[0] for bits in _bit_patterns(2000, 32)])

LOG_PROBS = {
    "float32 of every size": FLOAT32,
    "float64 of every size": FLOAT64,
    "one float64 among float32": [*FLOAT32, -0.1],
    "negative zero": [-0.0, 0.0, -0.0],
    "negative zero among float64": [-0.0, -0.1, 0.0],
    "smallest float32 denormals": [2.0**-149, -(2.0**-149), 2.0**-127],
    "smallest float64 denormals": [5e-324, -5e-324, 2.0**-1030],
    "largest float32": [(2 - 2.0**-23) * 2.0**127, -1e38],
    "largest float64": [1.7976931348623157e308, -1e300],
    "just beyond float32": [(2 - 2.0**-24) * 2.0**127],
    "one": [-1.0],
}

TOKEN_IDS = {
    "none": [],
    "one byte": [0, 255],
    "two bytes": [0, 256, 65_535],
    "four bytes": [65_536, 2**32 - 1],
    "eight bytes": [2**32, 2**63 - 1, 0],
    "just past one byte": [256],
    "just past two bytes": [65_536],
    "just past four bytes": [2**32],
    "many": [token * 7919 % 151_936 for token in range(5000)],
}

_ROUTES = base64.b64encode(bytes(range(48))).decode()

ROUTED_EXPERTS: dict[str, Any] = {
    "absent": None,
    "nested, small": [[[0, 7], [3, 127]], [[1, 2], [255, 4]]],
    "nested, past 255": [[[0, 256], [300, 511]]],
    "nested, just past 255": [[[0, 256]]],
    "nested, past 65535": [[[65_536, 2**31]]],
    "nested, the largest": [[[2**64 - 1, 0]]],
    "nested, padded with -1": [[[-1, 5], [6, -1]]],
    "nested, most negative": [[[-(2**63), 2**63 - 1]]],
    "nested, half signed and half too large": [[[-1, 2**63]]],
    "flat": [1, 2, 3],
    "deep": [[[[[[1]]]]]],
    "ragged": [[[1, 2], [3]], [[4]]],
    "empty": [],
    "empty inside": [[[], []], [[], []]],
    "floats": [[[1.0, 2.5]]],
    "integers and a float": [[[1, 2.0]]],
    "truth values": [[[True, False]]],
    "integers and a truth value": [[[1, True]]],
    "integers and a gap": [[[1, None]]],
    "a mapping": {"layers": 2, "ids": [[1, 2]]},
    "a number": 7,
    "an empty string": "",
    "int8 string": f"nrlre1:int8:2x3x8:{_ROUTES}",
    "int16 string": f"nrlre1:int16:1x3x8:{_ROUTES}",
    "int32 string": f"nrlre1:int32:2x3x2:{_ROUTES}",
    "string without routes": "nrlre1:int8:0x0x0:",
    "string with padding": "nrlre1:int8:1x1x1:AA==",
    "string without its padding": "nrlre1:int8:1x1x1:AA",
    "string whose last bits are not zero": "nrlre1:int8:1x1x1:AB==",
    "string with a line break": f"nrlre1:int8:2x3x8:{_ROUTES}\n",
    "string of the other base64 alphabet": "nrlre1:int8:1x1x3:_-_-",
    "string of another version": f"nrlre2:int8:2x3x8:{_ROUTES}",
    "string of no version": "routes on request",
}

FIELDS: dict[str, dict[str, Any]] = {
    "nothing generated": {"generation_token_ids": [], "generation_log_probs": []},
    "no tokens at all": {
        "prompt_token_ids": [],
        "generation_token_ids": [],
        "generation_log_probs": [],
    },
    "unicode": {"model": "модель 模型 🤖 e\u0301 \u0000 \u2028", "response_id": "é"},
    "empty strings": {"model": "", "response_id": "", "continuation_fingerprint": ""},
    "an exact time": {"created_at": 1_700_000_000.123_456_7},
    "output items": {
        "output_items": [
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "é🤖"}]},
            {"type": "function_call", "arguments": '{"a": [1, 2.0]}', "nested": {"a": {"b": [None]}}},
            {},
        ],
        "token_item_index": 3,
    },
    "lineage": {
        "parent_resolution": "root",
        "cum_len": 5,
        "digest": "ab" * 32,
        "continuation_fingerprint": "cd" * 32,
        "continuation_context_len": 3,
        "continuation_context_digest": "ef" * 32,
        "fingerprint_version": 2,
        "prefix_requested": True,
        "prefix_supplied": True,
    },
    "an unresolved parent": {
        "parent_resolution": "unresolved",
        "parent_resolution_reason": "not_attempted",
    },
    "extras": {
        "text": "é🤖",
        "nothing": None,
        "yes": True,
        "one": 1,
        "one_point": 1.0,
        "negative_zero": -0.0,
        "small": 5e-324,
        "third": 1 / 3,
        "largest": 2**63 - 1,
        "least": -(2**63),
        "list_": [],
        "mapping": {},
        "nested": {"a": [{"b": [[], {}, "", [1, 1.0, True, None]]}], "ключ 🤖": {"": 0}},
    },
    "an extra named like one of the package's own": {"v": 1, "e": {"p": []}, "rest": [], "incarnation": "x"},
}

CALL_IDS = [
    "call 🤖 é",
    "a/b:c{d}",
    "s",
    "o:1",
    "r:call-1",
    "c:call-1",
    "-",
    "0",
    "nil",
    "line\nbreak",
    "nul\0nul",
    "x" * 1024,
]

MALFORMED: dict[str, dict[str, Any]] = {
    "NaN": {"generation_log_probs": [float("nan"), -0.25]},
    "infinity": {"generation_log_probs": [float("inf"), -0.25]},
    "negative infinity": {"generation_log_probs": [-0.5, float("-inf")]},
    "a log probability that is text": {"generation_log_probs": ["-0.5", -0.25]},
    "a missing log probability": {"generation_log_probs": [None, -0.25]},
    "fewer log probabilities than ids": {"generation_log_probs": [-0.5]},
    "more log probabilities than ids": {"generation_log_probs": [-0.5, -0.25, -0.125]},
    "no log probabilities": {"generation_log_probs": None},
    "a negative prompt id": {"prompt_token_ids": [1, -1]},
    "a negative generated id": {"generation_token_ids": [-1, 5]},
    "a prompt id of 2**63": {"prompt_token_ids": [2**63]},
    "a generated id of 2**64": {"generation_token_ids": [2**64, 5]},
    "a prompt id that is a float": {"prompt_token_ids": [1.0]},
    "a generated id that is a float": {"generation_token_ids": [4.0, 5]},
    "a prompt id that is text": {"prompt_token_ids": ["1"]},
    "prompt ids that are text": {"prompt_token_ids": "123"},
    "prompt ids that are bytes": {"prompt_token_ids": b"123"},
    "prompt ids in two dimensions": {"prompt_token_ids": [[1, 2], [3, 4]]},
    "no prompt ids": {"prompt_token_ids": None},
    "a lone surrogate in the model": {"model": "\ud800"},
    "a lone surrogate in an extra": {"note": "\udfff"},
    "a lone surrogate deep in an extra": {"note": [{"a": ["\ud83d"]}]},
    "a lone surrogate as a key": {"note": {"\ud800": 1}},
    "a lone surrogate in an output item": {"output_items": [{"text": "\ud800"}]},
    "a lone surrogate in the routed experts": {"routed_experts": "\ud800"},
    "a lone surrogate in the call id": {"model_call_id": "\ud800"},
    "a newer schema": {"schema_version": 2},
    "schema zero": {"schema_version": 0},
    "a negative schema": {"schema_version": -1},
    "an item index past the items": {"token_item_index": 0},
    "a negative item index": {"output_items": [{}], "token_item_index": -1},
    "resolved without a parent": {"parent_resolution": "resolved"},
    "root with a parent": {"parent_resolution": "root", "parent_call_id": "call-0"},
    "unresolved with a parent": {"parent_resolution": "unresolved", "parent_call_id": "call-0"},
    "a resolution of another name": {"parent_resolution": "guessed"},
    "a delta prompt without a parent": {"prompt_is_delta": True},
    "a delta prompt of a root": {"parent_resolution": "root", "prompt_is_delta": True},
    "output items that are none": {"output_items": ["text"]},
    "a model that is a number": {"model": 7},
}

BAD_ROLLOUT_IDS = ["", "a/b", "a b", "é", "a\n", "{a}", "x" * 256, None, 7]
BAD_CALL_IDS = ["", "\ud800", None, 7]


class RecordingContract(TransportUnderTest):
    """Every valid record survives unchanged; every other is refused before anything happens."""

    async def assert_round_trip(self, entry: Any) -> None:
        """Check that ``entry`` comes back exactly, through other clients."""
        before = exact(entry)
        await self.put(entry)
        snapshot = await self.freeze()
        assert contents(snapshot) == {entry.model_call_id: before}
        assert not snapshot.incomplete

    @pytest.mark.parametrize("name", LOG_PROBS)
    async def test_log_probabilities_come_back_bit_by_bit(self, name: str) -> None:
        values = LOG_PROBS[name]
        await self.assert_round_trip(
            self.entry(generation_token_ids=[1] * len(values), generation_log_probs=values)
        )

    @pytest.mark.parametrize("name", TOKEN_IDS)
    async def test_token_ids_come_back(self, name: str) -> None:
        ids = TOKEN_IDS[name]
        await self.assert_round_trip(
            self.entry(
                prompt_token_ids=ids, generation_token_ids=ids[::-1], generation_log_probs=[-0.5] * len(ids)
            )
        )

    @pytest.mark.parametrize("name", ROUTED_EXPERTS)
    async def test_routed_experts_come_back(self, name: str) -> None:
        await self.assert_round_trip(self.entry(routed_experts=ROUTED_EXPERTS[name]))

    @pytest.mark.parametrize("name", FIELDS)
    async def test_other_fields_come_back(self, name: str) -> None:
        await self.assert_round_trip(self.entry(**FIELDS[name]))

    async def test_an_empty_list_does_not_come_back_as_nothing(self) -> None:
        await self.put(
            self.entry(generation_token_ids=[], generation_log_probs=[], output_items=[], routed_experts=[])
        )
        (found,) = (await self.freeze()).entries
        assert found.generation_token_ids == []
        assert found.generation_log_probs == []
        assert found.output_items == []
        assert found.routed_experts == []

    async def test_a_call_with_its_parent_comes_back(self) -> None:
        parent = self.entry("call-1", parent_resolution="root")
        child = self.entry(
            "call-2",
            parent_resolution="resolved",
            parent_call_id="call-1",
            prompt_is_delta=True,
            cum_len=10,
        )
        await self.put(child)
        await self.put(parent)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(parent), "call-2": exact(child)}
        assert not snapshot.incomplete

    @needs("checks_parents")
    async def test_a_missing_parent_makes_it_incomplete(self) -> None:
        child = self.entry("call-2", parent_resolution="resolved", parent_call_id="call-1")
        await self.put(child)
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-2": exact(child)}
        assert snapshot.incomplete

    async def test_call_ids_of_any_form_are_kept_apart(self) -> None:
        entries = {call: self.entry(call, model=str(number)) for number, call in enumerate(CALL_IDS)}
        sink = self.sink()
        for entry in entries.values():
            await sink.put(entry)
        snapshot = await self.freeze()
        assert contents(snapshot) == {call: exact(entry) for call, entry in entries.items()}
        assert (snapshot.version, snapshot.incomplete) == (len(CALL_IDS) + 1, False)

    @pytest.mark.parametrize("name", ["-0.0", "1.0", "True", "None", "absent"])
    async def test_content_that_is_merely_equal_is_not_identical(self, name: str) -> None:
        extras: dict[str, dict[str, Any]] = {
            "-0.0": {"extra": -0.0},
            "1.0": {"extra": 1.0},
            "True": {"extra": True},
            "None": {"extra": None},
            "absent": {},
        }
        others = [fields for other, fields in extras.items() if other != name]
        await self.put(self.entry(**extras[name]))
        for fields in others:
            with pytest.raises(self.conflict_error):
                await self.put(self.entry(**fields))

    async def test_negative_zero_is_another_log_probability_than_zero(self) -> None:
        await self.put(self.entry(generation_log_probs=[-0.0, -0.25]))
        with pytest.raises(self.conflict_error):
            await self.put(self.entry(generation_log_probs=[0.0, -0.25]))

    async def test_a_time_stamp_is_part_of_the_content(self) -> None:
        await self.put(self.entry(created_at=1_700_000_000.5))
        with pytest.raises(self.conflict_error):
            await self.put(self.entry(created_at=1_700_000_000.25))

    async def test_a_record_read_back_is_identical_to_the_one_put(self) -> None:
        entry = self.entry(**FIELDS["extras"], routed_experts=ROUTED_EXPERTS["nested, small"])
        await self.put(entry)
        await self.put(type(entry).model_validate(entry.model_dump(mode="json")))
        assert (await self.freeze()).version == 2

    @needs("refuses_bad_records")
    @pytest.mark.parametrize("name", MALFORMED)
    async def test_an_entry_that_was_spoilt_is_refused_and_changes_nothing(self, name: str) -> None:
        entry = self.spoilt(name)
        with pytest.raises(ValueError, match=r"."):
            await self.put(entry)
        snapshot = await self.freeze()
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, False)

    @needs("refuses_bad_records")
    async def test_a_refused_entry_leaves_its_intent_open_for_a_good_one(self) -> None:
        sink = self.sink()
        await sink.begin_call(self.rollout_id, "call-1")
        with pytest.raises(ValueError, match=r"."):
            await sink.put(self.spoilt("NaN"))
        await sink.put(self.entry())
        snapshot = await self.freeze()
        assert (len(snapshot.entries), snapshot.version, snapshot.incomplete) == (1, 2, False)

    @needs("refuses_bad_records")
    async def test_a_refused_entry_never_replaces_a_stored_one(self) -> None:
        entry = await self.given_open()
        with pytest.raises(ValueError, match=r"."):
            await self.put(self.spoilt("NaN"))
        snapshot = await self.freeze()
        assert contents(snapshot) == {"call-1": exact(entry)}
        assert (snapshot.version, snapshot.incomplete) == (2, False)

    @needs("refuses_bad_ids")
    @pytest.mark.parametrize("rollout_id", BAD_ROLLOUT_IDS)
    async def test_a_malformed_rollout_id_is_refused_by_every_step(self, rollout_id: Any) -> None:
        sink, source, entry = self.sink(), self.source(), self.entry()
        entry.rollout_id = rollout_id
        steps: list[Callable[[], Awaitable[Any]]] = [
            lambda: sink.put(entry),
            lambda: sink.begin_call(rollout_id, "call-1"),
            lambda: sink.mark_incomplete(rollout_id, "call-1"),
            lambda: source.freeze(rollout_id),
            lambda: source.drop(rollout_id, snapshot_id="s", version=1),
        ]
        for step in steps:
            with pytest.raises(ValueError, match=r"."):
                await step()

    @needs("refuses_bad_ids")
    @pytest.mark.parametrize("model_call_id", BAD_CALL_IDS)
    async def test_a_malformed_call_id_is_refused_and_changes_nothing(self, model_call_id: Any) -> None:
        sink, entry = self.sink(), self.entry()
        entry.model_call_id = model_call_id
        with pytest.raises(ValueError, match=r"."):
            await sink.put(entry)
        with pytest.raises(ValueError, match=r"."):
            await sink.begin_call(self.rollout_id, model_call_id)
        snapshot = await self.freeze()
        assert (snapshot.entries, snapshot.version, snapshot.incomplete) == ((), 1, False)

    def spoilt(self, name: str) -> Any:
        """Build a valid entry and change it afterwards, which no class checks."""
        entry = self.entry()
        for field, value in MALFORMED[name].items():
            setattr(entry, field, value)
        return entry
