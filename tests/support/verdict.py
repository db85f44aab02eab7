"""The laws that a ledger and the snapshots in it must keep, whatever was killed, cut or forgotten meanwhile.

Each law is stated once, here, for the tests and for the soak. What holds for a snapshot is said of what was
acknowledged before it was asked for; what was dropped is held to all that was acknowledged before the drop.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from support.ledger import Kind, Line


@dataclass
class Story:
    """All lines about one rollout, by their kind."""

    rollout: str
    lines: dict[Kind, list[Line]] = field(default_factory=lambda: defaultdict(list))

    def calls(self, kind: Kind, before_ns: int) -> set[str]:
        """The calls of which this was acknowledged before that moment."""
        return {line.call for line in self.lines[kind] if line.ended_ns < before_ns}

    def contents(self) -> dict[str, str]:
        """What each call was to hold."""
        return {line.call: line.facts["content"] for line in self.lines[Kind.INTENT]}


def stories(lines: Iterable[Line]) -> dict[str, Story]:
    found: dict[str, Story] = {}
    for line in lines:
        found.setdefault(line.rollout, Story(line.rollout)).lines[line.kind].append(line)
    return found


def violations(lines: Iterable[Line], *, server_kept_all: bool = False) -> list[str]:
    """Every law that was broken, in words.

    ``server_kept_all``: the server is known to have lost nothing that it acknowledged, so that every record
    must be there, and what was frozen stays so.
    """
    broken = []
    for story in stories(lines).values():
        laws = [_whole_or_incomplete, _once_and_as_put, _dropped_as_consumed]
        if server_kept_all:
            laws += [_nothing_is_gone, _freezes_agree]
        broken += [f"rollout {story.rollout}: {text}" for law in laws for text in law(story)]
    return broken


def _whole_or_incomplete(story: Story) -> Iterator[str]:
    """What was acknowledged is in the snapshot, and nothing announced is open, or it is incomplete."""
    for snapshot in story.lines[Kind.SNAPSHOT]:
        for missing in _missing(story, snapshot, snapshot.began_ns):
            yield f"looks complete in {_named(snapshot)}, though {missing}"


def _nothing_is_gone(story: Story) -> Iterator[str]:
    """Complete or not, every acknowledged record is in the snapshot."""
    for snapshot in story.lines[Kind.SNAPSHOT]:
        gone = story.calls(Kind.RECORD, snapshot.began_ns) - _entries(snapshot).keys()
        if gone:
            yield f"acknowledged records are not in {_named(snapshot)}: {sorted(gone)}"


def _once_and_as_put(story: Story) -> Iterator[str]:
    """No call comes twice, and each as it was put."""
    contents = story.contents()
    for snapshot in story.lines[Kind.SNAPSHOT]:
        calls = Counter(call for call, _ in snapshot.facts["entries"])
        for call in (call for call, count in calls.items() if count > 1):
            yield f"call {call} is {calls[call]} times in {_named(snapshot)}"
        for call, content in _entries(snapshot).items():
            if contents.get(call) != content:
                yield f"call {call} of {_named(snapshot)} is not what was put"


def _freezes_agree(story: Story) -> Iterator[str]:
    """One snapshot id; one content for each version; versions grow; nothing joins a frozen rollout."""
    snapshots = sorted(story.lines[Kind.SNAPSHOT], key=lambda line: line.ended_ns)
    for earlier in snapshots:
        for record in story.lines[Kind.RECORD]:
            if record.began_ns > earlier.ended_ns and record.call not in _entries(earlier):
                yield f"call {record.call} was put after {_named(earlier)} was frozen"
        for later in (line for line in snapshots if line.began_ns > earlier.ended_ns):
            if later.facts["id"] != earlier.facts["id"]:
                yield f"{_named(earlier)} became {_named(later)}"
            elif later.facts["version"] < earlier.facts["version"]:
                yield f"{_named(later)} came after {_named(earlier)}"
            elif later.facts["version"] == earlier.facts["version"] and _content(later) != _content(earlier):
                yield f"{_named(later)} was read with two contents"


def _dropped_as_consumed(story: Story) -> Iterator[str]:
    """A drop that was made names a snapshot that was read, and nothing was acknowledged that it lacks."""
    for drop in (line for line in story.lines[Kind.DROP] if line.facts["dropped"]):
        consumed = [
            line
            for line in story.lines[Kind.SNAPSHOT]
            if (line.facts["id"], line.facts["version"]) == (drop.facts["id"], drop.facts["version"])
        ]
        if not consumed:
            yield f"{_named(drop)} was dropped and never read"
        for snapshot in consumed:
            for missing in _missing(story, snapshot, drop.began_ns):
                yield f"{_named(drop)} was dropped as complete, though {missing}"


def _missing(story: Story, snapshot: Line, before_ns: int) -> Iterator[str]:
    """What keeps this snapshot from being complete, if it says that it is."""
    if snapshot.facts["incomplete"]:
        return
    entries, refused = _entries(snapshot), set(snapshot.facts["refused"])
    for call in sorted(story.calls(Kind.RECORD, before_ns) - entries.keys()):
        yield f"the record of call {call} was acknowledged and is not there"
    for call in sorted(story.calls(Kind.REFUSAL, before_ns) - refused):
        yield f"the refusal of call {call} was acknowledged and is not there"
    for call in sorted(story.calls(Kind.INTENT, before_ns) - entries.keys() - refused):
        yield f"call {call} was announced and never came"
    for call in sorted(story.calls(Kind.MARK, before_ns)):
        yield f"call {call} was marked as lost"


def _entries(snapshot: Line) -> dict[str, str]:
    return dict(snapshot.facts["entries"])


def _content(snapshot: Line) -> object:
    facts = snapshot.facts
    return sorted(facts["entries"]), sorted(facts["refused"]), facts["incomplete"]


def _named(line: Line) -> str:
    return f"snapshot {line.facts['id'][:8]} at version {line.facts['version']}"
