"""What the index of a rollout says of its records: the beginning of each, and nothing long."""

from __future__ import annotations

from typing import Any

import pytest
from support.backends import Place
from support.sample_entries import sample_entry
from support.sequences import WIDTHS, random_ids

from gym_capture_redis import codec, scripts
from gym_capture_redis.keys import RECORDED, rollout_key
from gym_capture_redis.settings import SinkSettings
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.subject import Subject
from gym_capture_redis.sync_client import SyncClient

LENGTHS = (0, 1, 31, 32, 85, 86, 127, 128, 254, 255, 256, 257, 511)


@pytest.mark.parametrize("below", WIDTHS)
async def test_each_record_begins_as_it_is_stored_whatever_the_length_of_its_tail(
    place: Place, namespace: str, below: int
) -> None:
    settings: dict[str, Any] = {"durability": place.durability}
    async with RedisTokenSink(place.url, namespace=namespace, **settings) as sink:
        for length in LENGTHS:
            ids = random_ids(length, length, below)
            await sink.put(
                sample_entry("r", f"c{length}", prompt_token_ids=ids, routed_experts=[[[length] * 99] * 50])
            )
    client = SyncClient(SinkSettings.build(place.url, namespace, settings))
    key = rollout_key(namespace, "r")
    call = scripts.index(key, incarnation="", from_seq=1, max_bytes=2**30)
    index = scripts.Index.parse(client.run(call, Subject("r"), deadline=client.deadline()))
    client.close()

    assert [name.decode() for name, _ in index.records] == [f"c{length}" for length in LENGTHS]
    for name, beginning in index.records:
        call_id = name.decode()
        about = {"rollout_id": "r", "model_call_id": call_id}
        record: Any = place.redis.hget(key, f"r:{call_id}")
        row: Any = place.redis.hget(key, f"c:{call_id}")
        whole = codec.parse(record, row.removeprefix(RECORDED), **about)
        head = codec.parse_head(beginning, **about)
        assert (head.end, head.tail, head.prompt_length) == (whole.end, whole.tail, whole.prompt_length)
        assert whole.small_fields.items() <= (head.small_fields | about).items()
        assert record.startswith(beginning)
        if not place.url.startswith("fakeredis"):  # which has no library for it, and gives the whole record
            assert len(beginning) < 500 + len(head.tail.raw)
