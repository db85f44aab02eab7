"""Agents that hold conversations with NeMo Gym's model servers, in each dialect that these speak."""

from __future__ import annotations

import http.client
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

Item = dict[str, Any]

CALL_TIMEOUT_S = 120.0
TOKEN_FIELDS = {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"}


class CallFailedError(Exception):
    """The model server refused the call, failed in it, or died."""


class Dialect(Protocol):
    """How a dialect asks, and what an agent keeps of an answer."""

    path: str

    def body(self, history: list[Item]) -> dict[str, Any]: ...
    def kept(self, answer: dict[str, Any]) -> list[Item]: ...
    def tool_calls(self, kept: list[Item]) -> list[str]: ...
    def tool_result(self, call_id: str, text: str) -> Item: ...


class Responses:
    path = "responses"

    def body(self, history: list[Item]) -> dict[str, Any]:
        return {"model": "policy", "input": history}

    def kept(self, answer: dict[str, Any]) -> list[Item]:
        return [without_tokens(item) for item in answer["output"]]

    def tool_calls(self, kept: list[Item]) -> list[str]:
        return [item["call_id"] for item in kept if item["type"] == "function_call"]

    def tool_result(self, call_id: str, text: str) -> Item:
        return {"type": "function_call_output", "call_id": call_id, "output": text}


class Chat:
    path = "chat/completions"

    def body(self, history: list[Item]) -> dict[str, Any]:
        return {"model": "policy", "messages": history}

    def kept(self, answer: dict[str, Any]) -> list[Item]:
        message = without_tokens(answer["choices"][0]["message"])
        return [{name: value for name, value in message.items() if value}]

    def tool_calls(self, kept: list[Item]) -> list[str]:
        return [call["id"] for message in kept for call in message.get("tool_calls", [])]

    def tool_result(self, call_id: str, text: str) -> Item:
        return {"role": "tool", "tool_call_id": call_id, "content": text}


class Messages:
    path = "messages"

    def body(self, history: list[Item]) -> dict[str, Any]:
        return {"model": "policy", "max_tokens": 64, "messages": history}

    def kept(self, answer: dict[str, Any]) -> list[Item]:
        return [{"role": "assistant", "content": answer["content"]}]

    def tool_calls(self, kept: list[Item]) -> list[str]:
        return [
            block["id"] for message in kept for block in message["content"] if block["type"] == "tool_use"
        ]

    def tool_result(self, call_id: str, text: str) -> Item:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": text}
        return {"role": "user", "content": [block]}


DIALECTS: dict[str, Dialect] = {"responses": Responses(), "chat": Chat(), "messages": Messages()}


def without_tokens(item: Item) -> Item:
    """What an agent sends back: text, not the arrays that came with it."""
    return {name: value for name, value in item.items() if name not in TOKEN_FIELDS}


class Agent:
    """One rollout's conversation; each call goes to the next of the workers, beginning with ``first``.

    ``streams``: answers are asked for, and read, as server-sent events.
    """

    def __init__(
        self, workers: Sequence[str], rollout: str, dialect: str, *, task: str = "", first: int = 0
    ) -> None:
        self.rollout = rollout
        self.task = task or f"task of {rollout}"
        self.history: list[Item] = []
        self.answers: list[dict[str, Any]] = []
        self.streams = False
        self._name, self._dialect = dialect, DIALECTS[dialect]
        self._workers = itertools.cycle([*workers[first:], *workers[:first]])

    def move_to(self, *workers: str) -> None:
        self._workers = itertools.cycle(workers)

    def converse(self, turns: int) -> None:
        """Say the task, then go on; call tools as asked."""
        for turn in range(turns):
            self.say(f"go on {turn}" if self.history else self.task)

    def say(self, text: str) -> None:
        """Make a call, and those that its tool calls lead to; a failed one leaves the history as it was."""
        self._call([*self.history, {"role": "user", "content": text}])
        while calls := self._dialect.tool_calls(self.history[-1:]):
            results = [self._dialect.tool_result(call, f"result of {call}") for call in calls]
            self._call([*self.history, *results])

    def _call(self, history: list[Item]) -> None:
        body = self._dialect.body(history)
        answer = self._post({**body, "stream": True} if self.streams else body)
        self.answers.append(answer)
        self.history = [*history, *self._dialect.kept(answer)]

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        url = (
            f"{next(self._workers)}/ng-rollout/{self.rollout}/training-token-capture/v1/{self._dialect.path}"
        )
        request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            raise CallFailedError(f"{error.code}: {error.read()!r}") from error
        except (OSError, http.client.HTTPException) as error:
            raise CallFailedError(repr(error)) from error
        answer: dict[str, Any] = self._assembled(content) if self.streams else json.loads(content)
        return answer

    def _assembled(self, events: bytes) -> dict[str, Any]:
        from nemo_gym.base_responses_api_model import _reconstruct_streamed_response

        answer: dict[str, Any] = _reconstruct_streamed_response(events, self._name)
        return answer
