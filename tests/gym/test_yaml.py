"""The YAML of the documents makes the sink and the lineage store, as Gym's servers make them."""

from __future__ import annotations

import re
import subprocess
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


def test_the_file_to_check_the_yaml_with_makes_what_it_says(written: Any, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "nemo-gym.md").read_text("utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if block.startswith("# check_yaml.py")]
    (tmp_path / "capture.yaml").write_text(pytest.importorskip("omegaconf").OmegaConf.to_yaml(written))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "capture.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "RedisTokenSink('redis://10.0.0.5:6379/0', namespace='run-17')",
        "RedisLineageStore('redis://10.0.0.5:6379/0', namespace='run-17')",
    ], done.stderr


@pytest.mark.parametrize("kind", ["sink", "lineage_store"])
def test_a_wrong_key_is_refused_by_name(written: Any, kind: str) -> None:
    written.token_id_capture[f"{kind}_kwargs"].name_space = "x"
    config = gym("config", "TokenIdCaptureConfig").model_validate(written)
    with pytest.raises(ConfigurationError, match="'name_space' is not a setting"):
        getattr(config, f"build_{kind}")()
