"""The report of the rounds: a table for people, and the same as JSON."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.disturbances import ACTIONS
from tests.chaos.matrix import ALL_POINTS, Cell
from tests.chaos.rounds import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One round: of a cell or of a scenario, and the command that repeats it."""

    cell: Cell | None
    outcome: Outcome
    command: str

    @property
    def name(self) -> str:
        return self.outcome.name


@dataclass(slots=True)
class Report:
    """All rounds so far."""

    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if not result.outcome.survived]

    def totals(self) -> dict[str, Any]:
        outcomes = [result.outcome for result in self.results]
        return {
            "rounds": sum(outcome.rounds for outcome in outcomes),
            "survived": sum(outcome.rounds_survived for outcome in outcomes),
            "not_reached": sum(not outcome.reached for outcome in outcomes),
            "clients": sum(outcome.clients for outcome in outcomes),
            "requests_lost": sum(outcome.lost for outcome in outcomes),
            "tokens_twice": sum(outcome.tokens_twice for outcome in outcomes),
            "tokens_missing": sum(outcome.tokens_missing for outcome in outcomes),
            "other_findings": sum(
                finding.kind not in {"lost", "no-end", "twice", "missing"}
                for outcome in outcomes
                for finding in outcome.findings
            ),
            "resumed_by_clients": sum(outcome.resumed for outcome in outcomes),
            "attempts_begun_again": sum(outcome.attempts for outcome in outcomes),
            "longest_stall_s": round(max((one.longer_s for one in outcomes), default=0.0), 2),
            "undisturbed_stall_s": round(max((one.undisturbed_s for one in outcomes), default=0.0), 2),
        }

    def markdown(self) -> str:
        """The matrix, the scenarios, the totals."""
        by_cell = {(one.cell.point, one.cell.action): one for one in self.results if one.cell is not None}
        lines = [f"| point | {' | '.join(ACTIONS)} |", f"|---|{'---|' * len(ACTIONS)}"] if by_cell else []
        for point in ALL_POINTS:
            found = [by_cell.get((point, action)) for action in ACTIONS]
            if any(found):
                lines.append(f"| `{point}` | {' | '.join(map(self._said, found))} |")
        scenarios = [one for one in self.results if one.cell is None]
        if scenarios:
            lines += ["", "| scenario | result | |", "|---|---|---|"]
            lines += [f"| {one.name} | {self._said(one)} | {one.outcome.note} |" for one in scenarios]
        lines += ["", "| total | |", "|---|---|"]
        lines += [f"| {name.replace('_', ' ')} | {value} |" for name, value in self.totals().items()]
        for result in self.failed:
            lines += ["", f"**{result.name}** fails; again: `{result.command}`", ""]
            lines += [f"- {finding}" for finding in result.outcome.findings[:12]]
            lines += [] if result.outcome.reached else ["- the point was not reached"]
        return "\n".join(lines) + "\n"

    def _said(self, result: Result | None) -> str:
        """The text of a cell: how much longer a client waited, or what went wrong."""
        if result is None:
            return ""
        if not result.outcome.reached:
            return "**not reached**"
        if not result.outcome.findings:
            return f"{result.outcome.longer_s:.1f} s"
        return f"**{', '.join(sorted({finding.kind for finding in result.outcome.findings}))}**"

    def json(self) -> str:
        """The same for programs."""
        rounds = [
            {
                "name": result.name,
                "point": result.cell.point if result.cell is not None else None,
                "action": result.cell.action if result.cell is not None else None,
                "survived": result.outcome.survived,
                "reached": result.outcome.reached,
                "stall_s": round(result.outcome.longer_s, 3),
                "clients": result.outcome.clients,
                "lost": result.outcome.lost,
                "tokens_twice": result.outcome.tokens_twice,
                "tokens_missing": result.outcome.tokens_missing,
                "resumed": result.outcome.resumed,
                "attempts": result.outcome.attempts,
                "rounds": result.outcome.rounds,
                "rounds_survived": result.outcome.rounds_survived,
                "took_s": round(result.outcome.took_s, 3),
                "note": result.outcome.note,
                "findings": [str(finding) for finding in result.outcome.findings],
                "command": result.command,
            }
            for result in self.results
        ]
        return json.dumps({"totals": self.totals(), "rounds": rounds}, indent=1)

    def write(self, folder: Path) -> None:
        """Write both into a folder."""
        (folder / "chaos.md").write_text(self.markdown())
        (folder / "chaos.json").write_text(self.json())


def keep(result: Result, folder: Path) -> Path:
    """Keep the records and transcripts of a failed round for inspection."""
    place = folder / "failed" / result.name
    place.mkdir(parents=True, exist_ok=True)
    with (place / "records.jsonl").open("w") as file:
        for record in result.outcome.records:
            line = {"seq": record.seq, "subject": record.subject, "data": record.data.hex()}
            file.write(json.dumps(line) + "\n")
    with (place / "seen.txt").open("w") as file:
        for seen in result.outcome.seen:
            file.write(f"{seen.request_id}: resumed {seen.resumed}, {seen.refusals}, {seen.gave_up!r}\n")
            for at_s, piece in zip(seen.moments_s[1:], seen.pieces, strict=True):
                file.write(f"  {at_s - seen.moments_s[0]:8.3f} s {piece}\n")
    (place / "findings.txt").write_text("\n".join(map(str, result.outcome.findings)) + "\n")
    return place
