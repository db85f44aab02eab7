"""Asks the sentinels of a URL for the primary of their service."""

from __future__ import annotations

import asyncio
from collections import deque

from redis import exceptions as redis_errors

from gym_capture_redis.connection import ask
from gym_capture_redis.faults import explain, is_transient
from gym_capture_redis.server_url import Address
from gym_capture_redis.settings import ConnectionSettings

_ASK_TIMEOUT_S = 1.0
"""One that is away must leave time to ask the others."""


class Sentinels:
    """The sentinels, those first that answered last."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._addresses = deque(settings.url.addresses)

    async def primary(self) -> Address:
        """Where the primary of the service is, as far as the first sentinel knows that answers.

        Raises:
            redis.exceptions.ConnectionError: none of them knows one now.
            redis.exceptions.RedisError: one refused the question for good.

        """
        said = ""
        for _ in range(len(self._addresses)):
            address = self._addresses[0]
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    answer = await self._ask(address)
            except (redis_errors.RedisError, OSError, TimeoutError) as error:
                if not isinstance(error, TimeoutError) and not is_transient(error):
                    raise
                said = explain(error)
            else:
                if answer is not None:
                    return answer
                said = "it does not know the service"
            self._addresses.rotate(-1)
        service = self._settings.url.service
        raise redis_errors.ConnectionError(f"no sentinel knows a primary of {service!r} (last: {said})")

    async def _ask(self, address: Address) -> Address | None:
        secret = self._settings.sentinel_password
        answer = await ask(
            self._settings,
            address,
            "SENTINEL",
            "GET-MASTER-ADDR-BY-NAME",
            self._settings.url.service,
            username=self._settings.sentinel_username,
            password=secret.get_secret_value() if secret else None,
        )
        if answer is None:
            return None
        host, port = answer
        return Address(host.decode(), int(port))
