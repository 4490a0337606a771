"""Views of a replayed history for `--until`, `--state`, `--diff`, `--step`; they return the exit status."""

import json
import sys

import click

from dalsegno.replay import recorded_request, verdicts
from dalsegno.replay.recorded_request import History
from dalsegno.replay.stepper import CommandOutput, Stepper, difference_of, indented, prompted
from dalsegno.replay.verdicts import ControlResult
from dalsegno.terminal.sanitise import plain as printable


def until(history: History, where: str, *, as_json: bool) -> int:
    """Show a position, the verdicts up to there, and the state."""
    timeline = recorded_request.timeline(history)
    stepper = Stepper(timeline, timeline.find(where))
    position, state = timeline.positions[stepper.place], timeline.state(stepper.place)
    here, data = stepper.here()
    found, _ = stepper.execute("verdict", [])
    shown = [verdicts.as_plain(ControlResult(verdict=one)) for one in position.verdicts.values()]
    show(
        ([*here, *found, *indented(state)], {"until": data, "verdicts": shown, "state": state}),
        as_json=as_json,
    )
    return 0 if all(one.matches for one in position.verdicts.values()) else 1


def state(history: History, where: str, *, as_json: bool) -> int:
    """Show the state after a record."""
    timeline = recorded_request.timeline(history)
    place = timeline.find(where)
    found = timeline.state(place)
    data = {"seq": timeline.positions[place].record.seq, "state": found}
    show((indented(found), data), as_json=as_json)
    return 0


def difference(history: History, before: str, after: str, *, as_json: bool) -> int:
    """Show the changes of the state between two records."""
    timeline = recorded_request.timeline(history)
    show(difference_of(timeline, timeline.find(before), timeline.find(after)), as_json=as_json)
    return 0


def step(history: History, begin: str | None, *, as_json: bool) -> int:
    """Run commands from stdin until its end."""
    timeline = recorded_request.timeline(history)
    stepper = Stepper(timeline, timeline.find(begin) if begin else 0)
    is_terminal = sys.stdin.isatty()

    def prompt() -> None:
        if is_terminal and not as_json:
            click.echo("replay> ", nl=False)

    stepper.run(prompted(sys.stdin.readline, prompt), click.echo, as_json=as_json)
    return 1 if stepper.refused and not is_terminal else 0


def show(output: CommandOutput, *, as_json: bool) -> None:
    """Print an output."""
    lines, data = output
    if as_json:
        click.echo(json.dumps(data, ensure_ascii=False))
    else:
        for line in lines:
            click.echo(printable(line))
