"""A small stand-in for a vLLM server: chat completions with token ids and log probabilities."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import struct
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

Message = dict[str, Any]

END, ROLES = 0, {"system": 1, "user": 2, "assistant": 3, "tool": 4}
FIRST_BYTE, FIRST_PAIR = 10, 1_000
HOLD_TIMEOUT_S = 120.0

# What the last message of a user makes the engine do.
REFUSE_LENGTH = "too long"
REFUSE = "not acceptable"
OMIT_TOKENS = "no token ids, please"
HOLD = "take your time"


class Served(NamedTuple):
    """One generation: the ids it was conditioned on, those it sampled, and their log probabilities."""

    prompt: list[int]
    generated: list[int]
    log_probs: list[float]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.generated


def calls_of(response: dict[str, Any] | None) -> list[Served]:
    """Return the generations that a rebuilt response consists of."""
    return [
        Served(item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"])
        for item in (response or {}).get("output", [])
        if "generation_token_ids" in item
    ]


class Refusal(Exception):  # noqa: N818 - an answer of the engine, not a failure of its own
    """A request that the engine does not generate for."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Stay silent: who asked may have been killed."""


class Engine:
    """Serves while it is open; ``served`` holds what it generated for each task.

    A task is the text of a conversation's first user message. Text is a function of the prompt, so that the
    same conversation is served the same tokens wherever and whenever it is held.

    With ``merges`` it samples other ids than its tokenizer gives the same text: only a request that brings
    ``required_prefix_token_ids`` is then conditioned on what was sampled before.
    """

    def __init__(self, *, merges: bool = False) -> None:
        self.merges = merges
        self.served: dict[str, list[Served]] = defaultdict(list)
        self.held: dict[str, threading.Event] = defaultdict(threading.Event)
        self.released = threading.Event()
        self._numbers = itertools.count(1)
        self._http = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        prompt = prompt_of(body)
        if path.endswith("/tokenize"):
            return {"tokens": prompt, "count": len(prompt)}
        messages: list[Message] = body["messages"]
        task, said = text_of(next(filter(is_user, messages))), text_of(messages[-1])
        if said == REFUSE_LENGTH:
            raise Refusal("This model's maximum context length is 8 tokens.")
        if said == REFUSE:
            raise Refusal("This request is not acceptable.")
        if said == HOLD:
            self.held[task].set()
            assert self.released.wait(HOLD_TIMEOUT_S), "nobody released the engine"
        message = reply(prompt, messages)
        generated = [*encode(text_of(message), merges=self.merges), END]
        served = Served(prompt, generated, [log_prob(prompt, number) for number in range(len(generated))])
        self.served[task].append(served)
        return self._completion(body, message, served, with_tokens=said != OMIT_TOKENS)

    def _completion(
        self, body: dict[str, Any], message: Message, served: Served, *, with_tokens: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "tool_calls" if message["tool_calls"] else "stop",
            "message": message,
        }
        completion = {
            "id": f"chatcmpl-{next(self._numbers)}",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": body["model"],
            "choices": [choice],
        }
        if with_tokens:
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token_id}", "logprob": value, "bytes": None, "top_logprobs": []}
                    for token_id, value in zip(served.generated, served.log_probs, strict=True)
                ]
            }
        if with_tokens and body.get("return_token_ids"):
            completion["prompt_token_ids"] = served.prompt
            choice["token_ids"] = served.generated
        return completion

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                try:
                    status, answer = 200, engine.answer(self.path, body)
                except AssertionError as error:
                    status, answer = 422, {"message": repr(error)}
                except Refusal as refusal:
                    status, answer = 400, {"message": str(refusal), "type": "BadRequestError", "code": 400}
                content = json.dumps(answer).encode()
                with contextlib.suppress(OSError):  # who asked may have been killed
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        return Handler


# The chat template and the tokenizer.


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Return the ids that the model is given: a required prefix stands for all up to the last answer."""
    messages, prefix = body["messages"], body.get("required_prefix_token_ids") or []
    if prefix:
        last = max(number for number, message in enumerate(messages) if message["role"] == "assistant")
        messages = messages[last + 1 :]
    rendered = [
        token_id
        for message in messages
        for token_id in (ROLES[message["role"]], *encode(text_of(message)), END)
    ]
    return [*prefix, *rendered, ROLES["assistant"]]


def is_user(message: Message) -> bool:
    return bool(message["role"] == "user")


def text_of(message: Message) -> str:
    """Everything of a message that the model sees, as one text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    reasoning = message.get("reasoning_content")
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    calls = "".join(
        f"\n{call['function']['name']}{canonical(call['function']['arguments'])}"
        for call in message.get("tool_calls") or []
    )
    return thought + content + calls


def canonical(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


def encode(text: str, *, merges: bool = False) -> list[int]:
    """One id for each byte; with ``merges`` one for two where the first is odd."""
    ids, rest = [], list(text.encode())
    while rest:
        first = rest.pop(0)
        if merges and first % 2 and rest:
            ids.append(FIRST_PAIR + 256 * first + rest.pop(0))
        else:
            ids.append(FIRST_BYTE + first)
    return ids


# The model.


def reply(prompt: list[int], messages: list[Message]) -> Message:
    """Return an assistant's message: every third calls a tool; a task that asks for it is thought about."""
    digest = hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()
    answers = sum(message["role"] == "assistant" for message in messages)
    calls_tool = answers % 3 == 1 and messages[-1]["role"] == "user"
    thinks = "think" in text_of(next(filter(is_user, messages)))
    return {
        "role": "assistant",
        "content": None if calls_tool else f"answer {answers}: {digest[:12]}",
        **({"reasoning_content": f"hm, {digest[12:20]}"} if thinks else {}),
        "tool_calls": [
            {
                "id": f"call-{digest[:8]}",
                "type": "function",
                "function": {"name": "look_up", "arguments": f'{{"key":"{digest[:6]}", "depth": {answers}}}'},
            }
        ]
        if calls_tool
        else [],
    }


def log_prob(prompt: list[int], number: int) -> float:
    """Return a float32, widened, as served log probabilities are."""
    (value,) = struct.unpack("<f", struct.pack("<f", -((len(prompt) * 31 + number * 7) % 97) / 13))
    return float(value)
