"""A batch of steps as few script calls, and the replies of each: the same for tasks and for threads. No I/O.

Steps of one kind share a script call; an entry of it answers for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from redis.exceptions import InvalidResponse, ResponseError

from gym_capture_redis.scripts import Argument, Call, Dialect, Reply, Step, command, read_replies

MAX_BATCH_CALLS = 64
MAX_BATCH_BYTES = 2**20
MAX_JOINED_BYTES = 2**18
"""A larger step is a script call of its own: joining it would save nothing and hold the server longer."""

ASKING: tuple[Argument, ...] = ("ASKING",)


class ToSend(Protocol):
    """A step on its way; ``by_source`` sends the whole script.

    ``asking``: to a node of a Cluster to which the rollout is just moving.
    """

    @property
    def call(self) -> Call:
        """The step."""

    @property
    def by_source(self) -> bool:
        """Whether the server may not know its script."""

    @property
    def asking(self) -> bool:
        """Whether the node must be told that another one has sent it here."""


ToSendT = TypeVar("ToSendT", bound=ToSend)


def grouped(batch: Sequence[ToSendT], *, one_key: bool) -> list[list[ToSendT]]:
    """The steps that one script call can hold: the same short step, each in the order they came.

    With ``one_key`` each script call is about one rollout, as in a Cluster, where others are in other slots.
    """
    if len(batch) == 1:
        return [list(batch)]
    groups: dict[object, list[ToSendT]] = {}
    for number, each in enumerate(batch):
        call = each.call
        joins = call.step.is_short and call.nbytes <= MAX_JOINED_BYTES
        alike = (call.step, call.healing, each.by_source, each.asking, call.key if one_key else b"")
        groups.setdefault(alike if joins else number, []).append(each)
    return list(groups.values())


def commands_of(group: Sequence[ToSend], dialect: Dialect) -> list[tuple[Argument, ...]]:
    """One script call for a group, behind the word that a node needs which is still getting the slot."""
    script_call = command([each.call for each in group], dialect, by_source=group[0].by_source)
    return [ASKING, script_call] if group[0].asking else [script_call]


def answers_of(
    groups: Sequence[Sequence[ToSend]],
    commands: Sequence[tuple[Argument, ...]],
    answers: Sequence[Any],
    run_id: str,
) -> list[Exception | list[Reply | ResponseError]]:
    """What each group was answered by the server with this run id: one error for all, or a reply for each.

    Raises:
        InvalidResponse: an answer does not have the form that the scripts give.

    """
    asked = [(words, answer) for words, answer in zip(commands, answers, strict=True) if words != ASKING]
    try:
        return [
            answer if isinstance(answer, Exception) else _read(words, answer, len(group), run_id)
            for group, (words, answer) in zip(groups, asked, strict=True)
        ]
    except ValueError:
        raise InvalidResponse("a reply has a form that no step gives") from None


def _read(words: Sequence[Argument], answer: Any, count: int, run_id: str) -> list[Reply | ResponseError]:
    if words[0] == Step.FETCH.value[0]:
        return [Reply.of_value(answer, run_id)]
    return read_replies(answer, count, run_id)
