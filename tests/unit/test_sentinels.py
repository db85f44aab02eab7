"""Who is asked for the primary, and what is made of the answers."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions as redis_errors

from gym_capture_redis import connection
from gym_capture_redis.sentinels import Sentinels
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import SinkSettings

PRIMARY = [b"10.0.0.1", b"6379"]
REFUSED = redis_errors.ConnectionError("refused")


class Network:
    """What each sentinel answers, by host; and who was asked, with which password."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.users: set[tuple[str | None, str | None]] = set()
        monkeypatch.setattr(connection, "ask", self._ask)

    async def _ask(
        self, _: SinkSettings, address: Address, *words: str, username: str | None, password: str | None
    ) -> Any:
        assert words == ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "service")
        self.asked.append(address.host)
        self.users.add((username, password))
        answer = self.answers[address.host]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


class Asking:
    """Sentinels, asked as the asynchronous client asks them."""

    def __init__(self, **settings: Any) -> None:
        self._settings = SinkSettings.build("redis+sentinel://:pw@a,b,c/service", "run", settings)
        self._sentinels = Sentinels(self._settings)

    async def primary(self) -> Address:
        return await connection.follow(self._sentinels.primary(), self._settings)


def sentinels(**settings: Any) -> Asking:
    return Asking(**settings)


async def test_the_first_that_answers_is_believed_and_asked_first_again(network: Network) -> None:
    network.answers = {"a": REFUSED, "b": PRIMARY, "c": PRIMARY}
    asking = sentinels()
    for _ in range(2):
        assert await asking.primary() == Address("10.0.0.1", 6379)
    assert network.asked == ["a", "b", "b"]


async def test_the_servers_password_is_not_shown_to_sentinels(network: Network) -> None:
    network.answers = {"a": PRIMARY}
    await sentinels().primary()
    await sentinels(sentinel_username="who", sentinel_password="secret").primary()
    assert network.users == {(None, None), ("who", "secret")}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "it does not know the service"),
        (REFUSED, "refused"),
        (redis_errors.BusyLoadingError("LOADING"), "LOADING"),
    ],
)
async def test_it_is_said_why_none_knows_a_primary(network: Network, answer: Any, said: str) -> None:
    network.answers = dict.fromkeys("abc", answer)
    with pytest.raises(
        redis_errors.ConnectionError, match=f"no sentinel knows a primary of 'service'.*{said}"
    ):
        await sentinels().primary()
    assert network.asked == ["a", "b", "c"]


async def test_a_refused_password_is_final(network: Network) -> None:
    network.answers = {"a": redis_errors.AuthenticationError("WRONGPASS")}
    with pytest.raises(redis_errors.AuthenticationError):
        await sentinels().primary()
