import pytest

from dalsegno.replay.timeline import ReplayTimeline
from models import registry
from shared.errors import ClientError
from shared.log.port import StoredRecord
from tests.conductor.script import SUBJECTS
from tests.dalsegno.histories import answered


def timeline(records: list[StoredRecord] | None = None) -> ReplayTimeline:
    return ReplayTimeline(records or answered(), ["r1"], graph_of=registry.graph, subjects=SUBJECTS)


def test_each_record_has_its_position() -> None:
    records = answered()
    found = timeline(records).positions
    assert [one.record for one in found] == records
    assert all(one.event is not None for one in found)


@pytest.mark.parametrize(
    ("where", "seq"),
    [
        ("5", 5),
        ("99", 12),
        ("r1.admitted", 4),
        ("node.ready", 5),
        ("node.ready.v1", 5),
        ("output.chunk", 8),
        ("request.finished", 12),
    ],
)
def test_a_position_is_found_by_number_by_id_and_by_type(where: str, seq: int) -> None:
    found = timeline()
    assert found.positions[found.find(where)].record.seq == seq


def test_a_type_is_looked_for_from_a_place_on() -> None:
    found = timeline()
    second = found.find("node.ready", found.find("node.ready") + 1)
    assert found.positions[second].record.seq == 7


def test_a_number_in_a_hole_of_the_log_is_the_position_before_it() -> None:
    records = [record for record in answered() if record.seq != 6]
    found = timeline(records)
    assert found.positions[found.find("6")].record.seq == 5


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ClientError, match=r"no record here is 'walk.lost': .* from 1 to 12, .* node.ready, "):
        timeline().find("walk.lost")
    with pytest.raises(ClientError, match="this history begins with record 1, after 0"):
        timeline().find("0")


def test_the_state_is_the_one_at_that_record_in_any_order_of_asking() -> None:
    found = timeline()
    phases = [found.state(place).get("r1", {}).get("phase") for place in range(12)]
    assert phases == [None, None, "waiting", *["running"] * 7, "finished", "finished"]
    assert [found.state(place).get("r1", {}).get("phase") for place in reversed(range(12))] == phases[::-1]


def test_a_state_has_the_world_the_steps_and_the_answer_so_far() -> None:
    found = timeline()
    state = found.state(found.find("9"))
    assert state["world"] == {
        "leader": "c1",
        "epoch": 1,
        "ranks": {"0": {"incarnation": 2, "kv_tokens": 128, "max_seq_len": 0, "weights": {}, "revision": ""}},
    }
    assert state["r1"]["results"]["0"]["prepare"]["prompt_tokens"] == 3
    assert state["r1"]["running"][0]["walks"] == ["prefill", "decode"]
    assert state["r1"]["output"] == {"chunks": 2, "tokens": 2, "text": "secret0secret1"}


def test_what_is_decided_and_not_recorded_yet_is_in_the_state() -> None:
    found = timeline()
    assert list(found.state(found.find("6"))["r1"]["expected"]) == ["r1.ready.1.1.0"]
    assert found.state(found.find("7"))["r1"]["expected"] == {}


def test_a_difference_names_what_changed_and_nothing_else() -> None:
    found = timeline()
    changes = {change.name: (change.before, change.after) for change in found.difference(7, 8)}
    assert changes == {
        "r1.output.chunks": (1, 2),
        "r1.output.tokens": (1, 2),
        "r1.output.text": ("secret0", "secret0secret1"),
    }
    assert found.difference(8, 8) == []


def test_verdicts_are_those_up_to_a_position() -> None:
    found = timeline([record for record in answered() if record.seq != 6])
    matches = [one.verdicts["r1"].matches for one in found.positions if "r1" in one.verdicts]
    assert matches == [True] * 3 + [False] * 6


def test_what_was_decided_and_is_not_in_the_log_is_seen_at_its_end() -> None:
    found = timeline([record for record in answered() if record.seq != 12])
    matches = [one.verdicts["r1"].matches for one in found.positions if "r1" in one.verdicts]
    assert matches == [True] * 8 + [False]
    mismatch = found.positions[-1].verdicts["r1"].mismatch
    assert mismatch is not None
    assert mismatch.what == "r1.end is decided, but the log does not have it"
