"""Asks the sentinels of a URL for the primary of their service. No I/O here."""

from __future__ import annotations

from collections import deque

from redis import exceptions as redis_errors

from gym_capture_redis.errors import ConfigurationError
from gym_capture_redis.faults import explain, is_transient, lacks_command
from gym_capture_redis.searches import Question, Search
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ServerSettings


class Sentinels:
    """The sentinels, those first that answered last."""

    def __init__(self, settings: ServerSettings) -> None:
        self._service = settings.url.service
        self._username = settings.sentinel_username
        secret = settings.sentinel_password
        self._password = secret.get_secret_value() if secret else None
        self._addresses = deque(settings.url.addresses)

    def primary(self) -> Search[Address]:
        """Where the primary of the service is, as far as the first sentinel knows that answers.

        Raises:
            redis.exceptions.ConnectionError: none of them knows one now.
            redis.exceptions.RedisError: one refused the question for good.
            ConfigurationError: one is no Sentinel.

        """
        said = ""
        words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        for _ in range(len(self._addresses)):
            answer = yield Question(self._addresses[0], words, self._username, self._password)
            if isinstance(answer, Exception):
                if lacks_command(answer):
                    raise ConfigurationError(
                        f"{self._addresses[0]} is no Sentinel; name the Sentinels (port 26379, mostly), "
                        "or use redis:// for a server without any"
                    )
                if not is_transient(answer):
                    raise answer
                said = explain(answer)
            elif answer is None:
                said = "it does not know the service"
            else:
                host, port = answer
                return Address(host.decode(), int(port))
            self._addresses.rotate(-1)
        raise redis_errors.ConnectionError(f"no sentinel knows a primary of {self._service!r} (last: {said})")
