"""Stepping through one history, forwards and backwards: its log, and the events outside of it.

The commands are those of `dalsegno replay --step` (`help` lists them), and

    accidents, a          what happened beside the log, from the last record to this; `a all` lists all

Records that the log has lost since are not shown. `--until STEP` shows the log as it was at that step.
"""

from operator import itemgetter
from typing import Final

from dalsegno.bundle.manifest import event_of
from dalsegno.history.event_description import summary_of, type_of, writer_of
from dalsegno.replay.stepper import CommandOutput, Stepper, line_of
from dalsegno.replay.timeline import ReplayTimeline
from dalsegno.terminal.sanitise import plain
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS
from tests.simulation.simulator import Happening, Simulation

ALL: Final = "all"


class HistoryStepper(Stepper):
    """A position in a simulated history."""

    def __init__(self, sim: Simulation) -> None:
        self.story = sim.story
        self._log = sim.log
        asked = list(sim.questions)
        super().__init__(
            ReplayTimeline(sim.log.records, asked, graph_of=sim.model.graph_of, subjects=SUBJECTS)
        )
        self._verbs["accidents"] = self._accidents

    def here(self) -> CommandOutput:
        """The current record, and the events outside of the log before it."""
        told, data = super().here()
        return [*map(told_of, self._since_last()), *told], data

    def _accidents(self, arguments: list[str]) -> CommandOutput:
        found = self.story if arguments == [ALL] else self._since_last()
        return list(map(told_of, found)) or ["nothing"], {"accidents": [one.what for one in found]}

    def _since_last(self) -> list[Happening]:
        """The events between the previous record and this one; with the last record, all later ones."""
        last = self.place == len(self.timeline.positions) - 1
        return [
            one
            for one in self.story
            if (self.place == 0 or not self._is_before(one, self.place - 1))
            and (last or self._is_before(one, self.place))
        ]

    def _is_before(self, happening: Happening, place: int) -> bool:
        seq = self.timeline.positions[place].record.seq
        return (happening.generation, happening.seq) < (self._log.written[place], seq)

    def all(self) -> list[str]:
        """The whole history in order: records, lost records, and the events in between."""
        told: list[tuple[tuple[int, float], str]] = []
        for place, position in enumerate(self.timeline.positions):
            line = line_of(position, place, len(self.timeline.positions))
            told.append(((self._log.written[place], position.record.seq), plain(line)))
        for generation, record in self._log.lost:
            told.append(((generation, record.seq), lost(record)))
        told += [((one.generation, one.seq + 0.5), told_of(one)) for one in self.story]
        return [line for _, line in sorted(told, key=itemgetter(0))]


def lost(record: StoredRecord) -> str:
    """One line about a record that the log has lost."""
    event = event_of(record, SUBJECTS)
    if event is None:
        return f"  (lost) {record.seq:>6}  {record.subject}: cannot be read"
    who, what = writer_of(event), type_of(event)
    line = f"{who:<14} {what:<18} {event.request_id or ''}  {summary_of(event)}"
    return plain(f"  (lost) {record.seq:>6}  {line}")


def told_of(happening: Happening) -> str:
    """One line about an event outside of the log."""
    return f"    *** step {happening.step}, behind record {happening.seq}: {happening.what}"
