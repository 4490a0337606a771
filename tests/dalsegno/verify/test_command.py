"""`dalsegno verify` finds forgeries whose digests are all consistent: those that a replay accepts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from click.testing import CliRunner, Result

from conductor.core.replay import Replayer
from dalsegno.bundle import bundle_file, export, record_rewriter
from dalsegno.cli import main
from models import registry
from shared.events import (
    AnyEvent,
    EpochOpened,
    OutputChunk,
    RequestAdmitted,
    RequestSubmitted,
    WorkerJoined,
    encode,
)
from shared.log.port import StoredRecord
from shared.sealing import seals
from shared.sealing.keys import SigningKey
from shared.sealing.segment import LogIdentity, Segment
from tests.conductor.script import SUBJECTS
from tests.dalsegno.histories import answered, collected

KEY: Final = SigningKey("55" * 32)
OTHER_KEY: Final = SigningKey("66" * 32)
Attack = Callable[[list[StoredRecord]], list[StoredRecord]]


def sealed(records: list[StoredRecord], key: SigningKey = KEY) -> StoredRecord:
    """The seal of all records."""
    identity = LogIdentity(stream=SUBJECTS.stream, created_ns=0, max_age_s=3600.0)
    segment = Segment(identity, SUBJECTS, 1, 1)
    for record in records:
        segment.add(record)
    last = records[-1]
    event = seals.signed(segment.draft((), last.seq), key, epoch=1)
    return StoredRecord(last.seq + 1, SUBJECTS.sealed, encode(event), last.time_ns)


def written(records: list[StoredRecord], seal: StoredRecord | None, **how: bool) -> None:
    """Write a bundle of these records; its chain of lines is consistent."""
    found = msgspec.structs.replace(collected(records), seals=[seal] if seal is not None else [])
    header, kept = export.bundled(found, **({"payloads": False, "redact": False} | how))
    with Path("x.bundle").open("wb") as file:
        bundle_file.write(file, header, kept)


def verified(*args: str) -> Result:
    return CliRunner().invoke(main, ["verify", "x.bundle", "--key", KEY.public.hex(), *args])


def rewriting(change: Callable[[Any], AnyEvent], kind: type) -> Attack:
    """An attack with our own rewriter: facts are changed, and all decisions and digests made again."""

    def attack(records: list[StoredRecord]) -> list[StoredRecord]:
        def rewrite(event: AnyEvent, _: str | None) -> AnyEvent:
            return change(event) if isinstance(event, kind) else event

        return record_rewriter.rewritten(records, rewrite, graph_of=registry.graph, subjects=SUBJECTS)

    return attack


def later(records: list[StoredRecord]) -> list[StoredRecord]:
    return [msgspec.structs.replace(one, time_ns=one.time_ns + 1) for one in records]


def with_other_core(event: RequestAdmitted) -> RequestAdmitted:
    return msgspec.structs.replace(event, pins=msgspec.structs.replace(event.pins, core="forged"))


def replaced(**fields: Any) -> Callable[[Any], AnyEvent]:
    return lambda event: msgspec.structs.replace(event, **fields)


ATTACKS: Final[dict[str, Attack]] = {
    "metadata of the answer": rewriting(replaced(metadata={"forged": True}), OutputChunk),
    "the answer": rewriting(replaced(text="forged", token_ids=[7]), OutputChunk),
    "the tenant": rewriting(replaced(tenant="forged"), RequestSubmitted),
    "the seed": rewriting(replaced(seed=7), RequestAdmitted),
    "the device of a worker": rewriting(replaced(device="forged"), WorkerJoined),
    "the conductor": rewriting(replaced(core="forged"), EpochOpened),
    "times": later,
    "core": rewriting(with_other_core, RequestAdmitted),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_an_untouched_bundle_is_intact() -> None:
    records = answered()
    written(records, sealed(records))
    found = verified()
    assert found.exit_code == 0, found.output
    assert "x.bundle: r1: INTACT: " in found.output


@pytest.mark.parametrize("name", ATTACKS)
def test_a_consistent_forgery_is_found(name: str) -> None:
    records = answered()
    forged = ATTACKS[name](records)
    assert forged != records
    assert Replayer(registry.graph, SUBJECTS).run(forged)["r1"].matches
    written(forged, sealed(records))
    found = verified()
    assert found.exit_code == 1, found.output
    assert "TAMPERED" in found.output


@pytest.mark.parametrize("name", ATTACKS)
def test_a_replay_fails_on_a_forgery(name: str) -> None:
    records = answered()
    written(ATTACKS[name](records), sealed(records))
    found = CliRunner().invoke(main, ["replay", "x.bundle"])
    assert found.exit_code == 1
    assert "TAMPERED" in found.output


def test_a_forgery_that_is_sealed_with_another_key_is_not_proven() -> None:
    forged = ATTACKS["the answer"](answered())
    written(forged, sealed(forged, OTHER_KEY))
    found = verified()
    assert found.exit_code == 3
    assert "which is not trusted here" in found.output


def test_a_bundle_without_seals_is_not_proven_and_its_replay_says_so() -> None:
    written(answered(), None)
    assert verified().exit_code == 3
    replayed = CliRunner().invoke(main, ["replay", "x.bundle"])
    assert replayed.exit_code == 0
    assert "not proven by seals: not sealed" in replayed.output


def test_sound_that_was_left_out_is_not_proven() -> None:
    records = answered(data=b"sound")
    written(records, sealed(records))
    assert verified().exit_code == 3
    written(records, sealed(records), payloads=True)
    assert verified().exit_code == 0


def test_a_redacted_bundle_cannot_be_verified() -> None:
    records = answered()
    written(records, sealed(records), redact=True)
    found = verified()
    assert found.exit_code == 1
    assert "is redacted: the seals of its log cannot cover it" in found.output


def test_a_missing_part_is_named() -> None:
    records = answered(parent="r1", parts=2)
    written(records, sealed(records))
    found = verified()
    assert found.exit_code == 3
    assert "r1-1: not proven by seals: there are no records of it" in found.output
    replayed = CliRunner().invoke(main, ["replay", "x.bundle"])
    assert replayed.exit_code == 1
    assert "r1-1: cannot be replayed: this part of the request is missing" in replayed.output


def test_the_result_can_be_read_by_programs() -> None:
    records = answered()
    written(ATTACKS["times"](records), sealed(records))
    found = json.loads(verified("--json").stdout)
    assert (found["request_id"], found["result"]) == ("r1", "changed")
    assert {finding["kind"] for finding in found["findings"]} == {"changed_request", "changed_member"}
