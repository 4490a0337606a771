"""A short part of the kill matrix on one deployment; and proof that the checks can fail.

`make chaos` runs the whole matrix.
"""

import asyncio
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest

from shared.faults import POINTS
from tests.chaos import liar
from tests.chaos.__main__ import of_cell, parse
from tests.chaos.checker import Finding, check
from tests.chaos.clients import ask
from tests.chaos.deployment import Deployment, Shape, deployed
from tests.chaos.liar import Lie, lying
from tests.chaos.matrix import Cell, cells
from tests.chaos.questions import GREEDY, LISTED, Question
from tests.chaos.report import Report, Result
from tests.chaos.rounds import Rounds
from tests.chaos.scenarios import OTHERS, SCENARIOS
from tests.e2e import pages
from tests.e2e.clients import ROOT
from tests.tiny import tiny_checkpoint

pytestmark = pytest.mark.timeout(300)  # the processes of a deployment start, and some start again
CELLS: Final = (Cell(point="worker.chunk.posted", action="cut"),)
LIES: Final[dict[str, Lie]] = {
    "twice": liar.duplicated,
    "missing": liar.dropped,
    "order": liar.swapped,
    "altered": liar.altered,
    "end-twice": liar.ended_twice,
    "behind-the-end": liar.ended_early,
}
"""By what the checker is to call it."""
LIED_ABOUT: Final = (GREEDY, LISTED)


@dataclass(slots=True)
class Proof:
    """The results of all rounds."""

    report: Report = field(default_factory=Report)
    honest: list[Finding] = field(default_factory=list)
    lies: dict[tuple[str, str], set[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    return asyncio.run(_prove(tmp_path_factory.mktemp("chaos")))


async def _prove(folder: Path) -> Proof:
    shape = Shape(checkpoint=tiny_checkpoint("qwen3"), forked=True)
    async with deployed(folder, shape) as deployment:
        rounds = Rounds(deployment)
        undisturbed = await rounds.undisturbed()
        proof = Proof()
        for question in LIED_ABOUT:
            proof.honest += await _told_by(deployment, question, list)
            for kind, lie in LIES.items():
                found = await _told_by(deployment, question, lie)
                proof.lies[kind, question.name] = {finding.kind for finding in found}
        for cell in CELLS:
            proof.report.results.append(await of_cell(deployment, rounds, undisturbed, cell))
        return proof


async def _told_by(deployment: Deployment, question: Question, lie: Lie) -> list[Finding]:
    """The checker's findings for a proxy that falsifies the gateway's answers."""
    start_seq = await deployment.log.last_seq() + 1
    name = getattr(lie, "__name__", "honest").replace("_", "-")
    async with lying(deployment.doors.urls[0], lie) as url:
        seen = await ask(replace(deployment.doors, urls=[url]), question, f"lie-{name}-{question.name}")
    epochs = [one for one in await deployment.log.records(1) if one.subject.endswith(".conductor.epoch")]
    records = await deployment.log.records(start_seq)
    return check([*(one for one in epochs if one.seq < start_seq), *records], [seen])


@pytest.mark.processes
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_everything_is_survived_with_nothing_lost_and_nothing_twice(cell: Cell, proof: Proof) -> None:
    [result] = [one for one in proof.report.results if one.cell == cell]
    assert result.outcome.reached, result.outcome.note
    assert not result.outcome.findings, f"{_told(result)}\nagain: {result.command}"
    print(f"{result.name}: {result.outcome.longer_s:.2f} s longer than undisturbed")


def _told(result: Result) -> str:
    return "\n".join(str(finding) for finding in result.outcome.findings)


@pytest.mark.processes
def test_a_proxy_that_changes_nothing_is_found_honest(proof: Proof) -> None:
    assert not proof.honest


@pytest.mark.processes
@pytest.mark.parametrize("question", [one.name for one in LIED_ABOUT])
@pytest.mark.parametrize("kind", LIES)
def test_a_proxy_that_lies_is_found_out(kind: str, question: str, proof: Proof) -> None:
    assert kind in proof.lies[kind, question]


# ---- what is run ---------------------------------------------------------------------------------


def test_every_instrumented_point_is_reached_in_the_code_at_one_place() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for folder in ("conductor", "gateway", "workers")
        for path in (ROOT / folder).rglob("*.py")
    ]
    code = "\n".join(sources)

    assert [point for point in POINTS if code.count(f'faults.reach("{point}")') != 1] == []
    assert code.count("faults.reach(") == len(POINTS)


def test_the_matrix_has_every_point_in_every_way() -> None:
    found = {(cell.point, cell.action) for cell in cells()}

    assert found >= {(point, action) for point in POINTS for action in ("kill", "stop", "cut")}
    assert {cell.role for cell in cells()} == {"gateway", "conductor", "worker", "nats"}
    assert [cell.name for cell in cells("worker", "chunk.acked", "cut")] == ["worker-chunk-acked-cut"]


def test_every_command_of_the_page_asks_for_something_that_there_is() -> None:
    commands = [one.command for one in pages.Page("docs/chaos.md").typed]
    asked = [
        parse(shlex.split(word.removeprefix("ARGS="))) for command in commands for word in _args(command)
    ]

    of = {role: len(list(cells(role))) for role in (None, "worker", "conductor")}
    assert len(commands) == len(asked) == 5
    assert [len(one.cells) for one in asked] == [of[None], 1, 0, of["worker"], of["conductor"]]
    assert [len(one.scenarios) for one in asked] == [len(SCENARIOS), 0, 1, 0, 0]
    assert [len(one.others) for one in asked] == [len(OTHERS), 0, 0, 0, 0]


def _args(command: str) -> list[str]:
    make, chaos, *args = shlex.split(command)
    assert (make, chaos) == ("make", "chaos")
    return args or [""]


@pytest.mark.processes
def test_the_report_says_what_went_wrong_and_how_to_see_it_again(proof: Proof) -> None:
    [first, *_] = proof.report.results
    finding = Finding(kind="twice", request_id="r1", message="it was told chunk 3 twice", tokens=5)
    outcome = replace(first.outcome, findings=[finding])
    report = Report([replace(first, outcome=outcome)])

    assert report.totals()["tokens_twice"] == 5
    assert report.totals()["survived"] == 0
    assert 'make chaos ARGS="--role worker --point chunk.posted --action cut"' in report.markdown()
    assert "it was told chunk 3 twice" in report.markdown()
