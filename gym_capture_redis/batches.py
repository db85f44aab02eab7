"""A batch of steps as few script calls, and the replies of each: the same for tasks and for threads. No I/O.

Steps of one kind share a script call; an entry of it answers for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

from redis.exceptions import InvalidResponse, ResponseError

from gym_capture_redis.scripts import (
    EXEC,
    MAX_JOINED_BYTES,
    Argument,
    Call,
    Dialect,
    Reply,
    Step,
    commands,
    read_replies,
)

MAX_BATCH_CALLS = 64
MAX_BATCH_BYTES = 2**20

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
    """What sends a group, behind the word that a node needs which is still getting the slot."""
    sent = commands([each.call for each in group], dialect, by_source=group[0].by_source)
    return [ASKING, *sent] if group[0].asking else sent


def answers_of(
    groups: Sequence[Sequence[ToSend]],
    sent: Sequence[Sequence[tuple[Argument, ...]]],
    answers: Sequence[Any],
    run_id: str,
) -> list[Exception | list[Reply | ResponseError]]:
    """What each group was answered by the server with this run id: one error for all, or a reply for each.

    ``sent`` are the commands of each group, to all of which ``answers`` are the replies.

    Raises:
        InvalidResponse: an answer does not have the form that the scripts give.

    """
    each = iter(answers)
    try:
        return [
            _read(words[-1], list(islice(each, len(words))), len(group), run_id)
            for group, words in zip(groups, sent, strict=True)
        ]
    except ValueError:
        raise InvalidResponse("a reply has a form that no step gives") from None


def _read(
    last: tuple[Argument, ...], answers: Sequence[Any], count: int, run_id: str
) -> Exception | list[Reply | ResponseError]:
    """The first error tells why; else what the last command was answered."""
    answer = next((answer for answer in answers if isinstance(answer, Exception)), answers[-1])
    if last == EXEC and isinstance(answer, list):
        answer = next(iter(answer), None)  # of the script, which comes first
    if isinstance(answer, Exception):
        return answer
    if last[0] == Step.FETCH.value[0]:
        return [Reply.of_value(answer, run_id)]
    return read_replies(answer, count, run_id)
