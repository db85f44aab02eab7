"""The YAML of the documents makes the sink and the lineage store, as Gym's servers make them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym.token_id_capture", reason="NeMo Gym reads this YAML")

from support.conversations import gym
from support.documents import yaml_with

from gym_capture_redis import RedisLineageStore, RedisTokenSink
from gym_capture_redis.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "nemo-gym.md"]

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Gym builds the classes of its YAML on Python 3.12 and newer only"
)


@pytest.fixture(params=DOCUMENTS, ids=lambda path: path.name)
def written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration as it stands in the document; OmegaConf's containers all the way down."""
    omegaconf = pytest.importorskip("omegaconf", reason="NeMo Gym reads YAML with it")
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    return omegaconf.OmegaConf.create(yaml_with("RedisTokenSink", request.param))


def test_sink_and_lineage_store_are_made_for_the_same_server_and_namespace(written: Any) -> None:
    config = gym("config", "TokenIdCaptureConfig").model_validate(written)
    sink, store = config.build_sink(), config.build_lineage_store()
    assert isinstance(sink, RedisTokenSink)
    assert isinstance(store, RedisLineageStore)
    for name in ("url", "namespace", "password"):
        assert getattr(sink._settings, name) == getattr(store._settings, name)
    assert sink._settings.password is not None
    assert sink._settings.password.get_secret_value() == "secret"


def test_nested_settings_may_be_omegaconfs(written: Any) -> None:
    for kwargs in (written.token_id_capture.sink_kwargs, written.token_id_capture.lineage_store_kwargs):
        kwargs.url = "rediss://10.0.0.5/0"
        kwargs.tls = {"check_hostname": False}
    config = gym("config", "TokenIdCaptureConfig").model_validate(written)
    for built in (config.build_sink(), config.build_lineage_store()):
        assert built._settings.tls.check_hostname is False
    containers = written.token_id_capture.lineage_store_kwargs
    assert RedisLineageStore(**containers)._settings.tls is not None


@pytest.mark.parametrize("kind", ["sink", "lineage_store"])
def test_a_wrong_key_is_refused_by_name(written: Any, kind: str) -> None:
    written.token_id_capture[f"{kind}_kwargs"].name_space = "x"
    config = gym("config", "TokenIdCaptureConfig").model_validate(written)
    with pytest.raises(ConfigurationError, match="'name_space' is not a setting"):
        getattr(config, f"build_{kind}")()
