"""Differences between recorded and repeated decisions: by leaf, and grouped by event type and field. Pure.

    leaf     one value of one event: `walks[0].args.ignore_eos`, recorded True, found False
    group    the leaves with the same level, event type and field, whatever their place in a list

A group is one line of the report, and what an entry of an `--accept` file names.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

from dalsegno.replay.timeline import leaves

Level: TypeAlias = Literal["control", "schedule", "data"]
LEVELS: Final[tuple[Level, ...]] = ("control", "schedule", "data")

DECISION: Final = "(decision)"
"""The field of a difference that is the whole event: it was recorded or is decided, but not both."""
WHEN: Final = "(when)"
"""The field of a decision that is made earlier or later than recorded."""
ORDER: Final = "(order)"
"""The field of a decision that is made at the recorded time, but after a decision that followed it."""
ERROR: Final = "(error)"
"""The field of an exception: the code that is installed here fails where that of the log decided."""
STAMPS: Final = frozenset({"writer", "number", "epoch"})
"""Fields of the writer, which are no part of a decision."""

_PLACE: Final = re.compile(r"\[\d+\]")
_SHOWN_CHARS: Final = 60


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One value that is decided, or computed, differently.

    Attributes:
        event: the event's type without its version, `node.ready`; of data, the edge.
        field: the path of the value, with `[*]` for each place in a list; or one of the names above.
        recorded, found: JSON values; None where there is none.
        seq: the position of the record, or of the record after which it is decided now; None if unknown.
        source: the name of its log or bundle.
    """

    level: Level
    event: str
    field: str
    recorded: Any
    found: Any
    request_id: str
    source: str = ""
    seq: int | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All differences of one event type and field.

    Attributes:
        requests: the number of requests that have one; `of`, of all that were compared at this level.
        values: the recorded and found values as JSON, most frequent first, with their numbers.
        first: the first difference.
        members: all of them.
    """

    level: Level
    event: str
    field: str
    requests: int
    of: int
    values: list[tuple[str, str, int]]
    first: Difference
    members: list[Difference]

    @property
    def name(self) -> str:
        return f"{self.event} {self.field}"


def between(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, recorded and found value of each leaf that differs between two events as plain data."""
    was = dict(leaves({name: value for name, value in recorded.items() if name not in STAMPS}))
    becomes = dict(leaves({name: value for name, value in found.items() if name not in STAMPS}))
    for name in dict.fromkeys((*was, *becomes)):
        if was.get(name) != becomes.get(name):
            yield _PLACE.sub("[*]", name), was.get(name), becomes.get(name)


def grouped(found: Iterable[Difference], compared: Mapping[Level, int]) -> list[Group]:
    """Group differences, in the order of the levels, then the largest group first.

    Args:
        found: the differences, in the order of their sources.
        compared: by level, the number of requests that were compared.
    """
    groups: dict[tuple[str, str, str], list[Difference]] = {}
    for one in found:
        groups.setdefault((one.level, one.event, one.field), []).append(one)
    made = [_group(members, compared) for members in groups.values()]
    return sorted(made, key=lambda group: (LEVELS.index(group.level), -group.requests))


def _group(members: list[Difference], compared: Mapping[Level, int]) -> Group:
    first = members[0]
    pairs = Counter((as_json(one.recorded), as_json(one.found)) for one in members)
    return Group(
        level=first.level,
        event=first.event,
        field=first.field,
        requests=len({(one.source, one.request_id) for one in members}),
        of=compared.get(first.level, 0),
        values=[(was, becomes, count) for (was, becomes), count in pairs.most_common()],
        first=first,
        members=members,
    )


def line_of(group: Group) -> str:
    """A group in one line; the caller sanitises it."""
    [(was, becomes, _), *others] = group.values
    more = f" and {len(others):,} other {'values' if len(others) > 1 else 'value'}" if others else ""
    first = group.first
    where = f" of {first.source}" if first.source else ""
    at = "" if first.seq is None else f" at {first.seq}"
    return (
        f"{group.level}: {group.requests:,} of {group.of:,}: {group.event} {group.field} "
        f"{cut(was)} -> {cut(becomes)}{more}, first {first.request_id}{where}{at}"
    )


def as_json(value: Any) -> str:
    """A value as the report shows it; `nothing` for an absent one."""
    if value is None:
        return "nothing"
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def cut(text: str) -> str:
    """A text, shortened for a line."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
