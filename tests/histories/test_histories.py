"""Every recorded history is decided again as it was; one that was altered is not."""

import subprocess
import sys
from pathlib import Path
from typing import Final, get_args

import pytest

from conductor.core.lifecycle import Phase
from dalsegno.bundle import bundle_file
from dalsegno.replay import recorded_request
from dalsegno.replay.verdicts import ControlResult
from shared.events import ConductorEvent, LogSealed
from tests.histories import FOLDER, WRONG
from tests.histories.record import RECORDINGS

MAX_BYTES: Final = 30_000
LARGER: Final = {"sound-worker-died": 50_000}
"""Two attempts of two ranks that tell one another of every token."""
ENDS: Final = {
    "cancelled": Phase.CANCELLED,
    "deadline": Phase.FAILED,
    "failed": Phase.FAILED,
    "poison": Phase.FAILED,
    "rejected": Phase.REJECTED,
    "unreadable": Phase.REJECTED,
    "worker-lost": Phase.FAILED,
}
"""How those ended that did not finish."""
BUNDLES: Final = sorted(FOLDER.glob("*.bundle"))


def results(path: Path) -> list[ControlResult]:
    return recorded_request.control(recorded_request.of_bundle(str(path)))


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
def test_a_history_is_decided_again_as_it_was(path: Path) -> None:
    found = results(path)
    assert found
    for one in found:
        assert one.matches, (one.cannot, one.verdict.mismatch)
        assert one.verdict.phase is ENDS.get(path.stem, Phase.FINISHED)


def test_every_recording_is_here_and_nothing_else() -> None:
    recorded = {name for recording in RECORDINGS for name in recording.scenes}
    assert {path.stem for path in BUNDLES} == recorded
    assert [path.name for path in WRONG.iterdir()] == ["altered.bundle"]


@pytest.mark.parametrize("path", [*BUNDLES, *WRONG.glob("*.bundle")], ids=lambda path: path.stem)
def test_a_history_is_small(path: Path) -> None:
    assert path.stat().st_size < LARGER.get(path.stem, MAX_BYTES)


def test_every_kind_of_decision_is_in_one_of_them() -> None:
    bundles = [bundle_file.read(str(path)) for path in BUNDLES]
    schemas = {tag for bundle in bundles for tag in bundle.header.schemas}
    sealed = {str(LogSealed.__struct_config__.tag)} if any(bundle.seals for bundle in bundles) else set()
    assert {str(kind.__struct_config__.tag) for kind in get_args(ConductorEvent)} <= schemas | sealed


def test_the_altered_history_does_not_match_and_it_is_said_where_and_how() -> None:
    [one] = results(WRONG / "altered.bundle")
    mismatch = one.verdict.mismatch
    assert mismatch is not None
    assert one.cannot is None
    assert mismatch.what == "request plain: plain.end is recorded otherwise than decided"
    assert mismatch.expected is not None
    assert mismatch.recorded is not None
    differing = {k for k in mismatch.expected if mismatch.expected[k] != mismatch.recorded[k]}
    assert differing - {"writer", "number", "epoch"} == {"usage"}
    counts = [side["usage"]["completion_tokens"] for side in (mismatch.expected, mismatch.recorded)]
    assert counts[1] == counts[0] + 1
    assert mismatch.seq == bundle_file.read(str(WRONG / "altered.bundle")).records[-1].seq


@pytest.mark.processes
def test_the_folder_is_a_gate_as_it_stands() -> None:
    def replay(folder: Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "dalsegno", "replay", str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    whole, wrong = replay(FOLDER), replay(WRONG)
    assert whole.returncode == 0, whole.stdout
    assert " requests match; " in whole.stdout.splitlines()[-1]
    assert wrong.returncode == 1
    assert wrong.stdout.splitlines()[-1].startswith("0 of 1 requests match; 1 differs; ")
