"""Interactive stepping through a replayed history: the commands, and their outputs.

    next, n [COUNT]       the next record, or the COUNT-th from here; so is an empty line
    previous, p [COUNT]   back
    go, g WHERE           to a position of the log, an event's id, or the next event of a type
    state, s [NAME]       the state after this record; of one request, or `world`
    diff, d [FROM [TO]]   the changes by this record; or since FROM, or between the two
    event, e              all of this record
    list, l               all records, a line each
    verdict, v            the verdicts up to here
    quit, q               end

Commands are read line by line from a terminal or a pipe.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from dalsegno.history.event_description import summary_of, type_of, writer_of
from dalsegno.replay import verdicts
from dalsegno.replay.timeline import ReplayTimeline, StateChange, TimelinePosition, plain
from dalsegno.terminal.sanitise import plain as printable
from shared.errors import ClientError

CommandOutput = tuple[list[str], dict[str, Any]]
"""A command's output as text lines and as JSON values."""

_HELP: Final = (__doc__ or "").split("\n\n")[1].splitlines()


class Stepper:
    """The current place in a history, moved by commands.

    Attributes:
        place: the index of the current position, from 0.
        refused: the number of commands that were not understood.
    """

    def __init__(self, timeline: ReplayTimeline, place: int = 0) -> None:
        self.timeline = timeline
        self.place = place
        self.refused = 0
        self._verbs: dict[str, Callable[[list[str]], CommandOutput]] = {
            "next": self._next,
            "previous": self._previous,
            "go": self._go,
            "state": self._state,
            "diff": self._diff,
            "event": self._event,
            "list": self._list,
            "verdict": self._verdict,
            "help": lambda _: (list(_HELP), {"help": list(_HELP)}),
        }

    def run(self, commands: Iterable[str], say: Callable[[str], None], *, as_json: bool) -> None:
        """Execute commands until `quit` or their end."""
        self._say(self.here(), say, as_json=as_json)
        for command in commands:
            verb, *arguments = command.split() or ["next"]
            if verb in {"quit", "q"}:
                return
            try:
                answer = self.execute(verb, arguments)
            except ClientError as error:
                self.refused += 1
                answer = [error.message], {"error": error.message}
            self._say(answer, say, as_json=as_json)

    def execute(self, verb: str, arguments: list[str]) -> CommandOutput:
        """Execute one command.

        Raises:
            ClientError: the command does not exist, or its arguments are wrong.
        """
        name = next((one for one in self._verbs if verb in (one, one[0])), None)
        if name is None:
            raise ClientError(f"no such command: {verb!r}; expected one of {', '.join(self._verbs)}, quit")
        return self._verbs[name](arguments)

    @staticmethod
    def _say(answer: CommandOutput, say: Callable[[str], None], *, as_json: bool) -> None:
        lines, data = answer
        if as_json:
            say(json.dumps(data, ensure_ascii=False))
        else:
            for line in lines:
                say(printable(line))

    # ---- moving ------------------------------------------------------------------------------------
    def here(self) -> CommandOutput:
        """The current record, and its mismatch if it has one."""
        position = self.timeline.positions[self.place]
        shown = [line_of(position, self.place, len(self.timeline.positions))]
        data: dict[str, Any] = {"place": self.place, "seq": position.record.seq} | event_of(position)
        for verdict in position.verdicts.values():
            mismatch = verdict.mismatch
            if mismatch is not None and mismatch.seq in (position.record.seq, None):
                shown += [f"  {mismatch.what}", *(f"  {line}" for line in verdicts.explained(mismatch))]
                data["mismatch"] = verdicts.mismatch_as_plain(mismatch)
        return shown, data

    def _next(self, arguments: list[str]) -> CommandOutput:
        return self._move(_number(arguments, "next"))

    def _previous(self, arguments: list[str]) -> CommandOutput:
        return self._move(-_number(arguments, "previous"))

    def _move(self, by: int) -> CommandOutput:
        last = len(self.timeline.positions) - 1
        if self.place + by > last and self.place == last:
            raise ClientError(f"this is the end: record {self.timeline.positions[last].record.seq}")
        if self.place + by < 0 and self.place == 0:
            raise ClientError(f"this is the beginning: record {self.timeline.positions[0].record.seq}")
        self.place = min(max(self.place + by, 0), last)
        return self.here()

    def _go(self, arguments: list[str]) -> CommandOutput:
        if len(arguments) != 1:
            raise ClientError("go: expected one position of the log, event id or event type")
        self.place = self.timeline.find(arguments[0], self.place + 1)
        return self.here()

    # ---- showing -----------------------------------------------------------------------------------
    def _state(self, arguments: list[str]) -> CommandOutput:
        state = self.timeline.state(self.place)
        if arguments:
            if len(arguments) > 1 or arguments[0] not in state:
                raise ClientError(f"state: expected one of {', '.join(state)}")
            state = {arguments[0]: state[arguments[0]]}
        return indented(state), {"seq": self._seq(self.place), "state": state}

    def _diff(self, arguments: list[str]) -> CommandOutput:
        if len(arguments) > 2:
            raise ClientError("expected at most two positions, FROM and TO")
        found = [self.timeline.find(one) for one in arguments]
        before = found[0] if found else max(self.place - 1, 0)
        after = found[1] if len(found) == 2 else self.place
        return difference_of(self.timeline, before, after)

    def _event(self, arguments: list[str]) -> CommandOutput:
        position = self.timeline.positions[self.place]
        data = {"seq": position.record.seq} | event_of(position)
        return indented(data), data

    def _list(self, arguments: list[str]) -> CommandOutput:
        total = len(self.timeline.positions)
        shown = [
            ("> " if place == self.place else "  ") + line_of(position, place, total)
            for place, position in enumerate(self.timeline.positions)
        ]
        data = [{"seq": one.record.seq, "what": what_of(one)} for one in self.timeline.positions]
        return shown, {"place": self.place, "records": data}

    def _verdict(self, arguments: list[str]) -> CommandOutput:
        found = self.timeline.positions[self.place].verdicts
        shown = [f"{request_id}: {verdicts.so_far(one)}" for request_id, one in found.items()]
        data = [verdicts.as_plain(verdicts.ControlResult(verdict=one)) for one in found.values()]
        return shown or ["nothing is submitted yet"], {"seq": self._seq(self.place), "verdicts": data}

    def _seq(self, place: int) -> int:
        return self.timeline.positions[place].record.seq


# ---- output -----------------------------------------------------------------------------------------------


def difference_of(timeline: ReplayTimeline, before: int, after: int) -> CommandOutput:
    """The changes between two positions."""
    seqs = [timeline.positions[place].record.seq for place in (before, after)]
    changes = timeline.difference(before, after)
    shown = [_change(one) for one in changes] or [f"nothing changed from {seqs[0]} to {seqs[1]}"]
    return shown, {"from": seqs[0], "to": seqs[1], "changes": msgspec.to_builtins(changes)}


def line_of(position: TimelinePosition, place: int, total: int) -> str:
    """A record in one line, with its place among all."""
    event = position.event
    head = f"[{place + 1}/{total}] {position.record.seq:>6}"
    if event is None:
        return f"{head}  ?  {position.record.subject}: cannot be read"
    whose = f" {event.request_id}" if event.request_id else ""
    return f"{head}  {writer_of(event):<14} {type_of(event):<18}{whose}  {summary_of(event)}"


def what_of(position: TimelinePosition) -> str | None:
    """The type of a record's event, without its version."""
    return type_of(position.event) if position.event is not None else None


def event_of(position: TimelinePosition) -> dict[str, Any]:
    """A record as JSON values."""
    event = plain(position.event) if position.event is not None else None
    return {"time_ns": position.record.time_ns, "subject": position.record.subject, "event": event}


def indented(value: Any) -> list[str]:
    """A value as lines of indented JSON."""
    return json.dumps(value, ensure_ascii=False, indent=2).splitlines()


def _change(change: StateChange) -> str:
    if change.before is None:
        return f"+ {change.name}: {_short(change.after)}"
    if change.after is None:
        return f"- {change.name}: {_short(change.before)}"
    return f"  {change.name}: {_short(change.before)} -> {_short(change.after)}"


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(arguments: list[str], verb: str) -> int:
    if not arguments:
        return 1
    if len(arguments) > 1 or not arguments[0].isdecimal() or int(arguments[0]) < 1:
        raise ClientError(f"{verb} takes a number of records, 1 or more; found {' '.join(arguments)!r}")
    return int(arguments[0])


def prompted(read: Callable[[], str], prompt: Callable[[], None]) -> Iterator[str]:
    """Yield input lines until there are none; `prompt` is called before each."""
    while True:
        prompt()
        line = read()
        if not line:
            return
        yield line
