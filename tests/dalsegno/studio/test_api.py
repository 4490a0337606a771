"""The studio's data: every recorded history on every screen, filters, bundles that are dropped, errors."""

import base64
import io
import wave
from pathlib import Path
from typing import Any

import pytest

from dalsegno.bundle import bundle_file
from dalsegno.replay import recorded_request
from dalsegno.studio import media
from dalsegno.studio.recordings import BundleRecording, Shelf
from dalsegno.studio.study import Study
from tests.dalsegno import histories
from tests.dalsegno.studio.pages import BUNDLES, CHANGE, HISTORIES, Visitor, visitor

ALTERED = HISTORIES / "wrong" / "altered.bundle"


def study_of(path: Path) -> Study:
    history = recorded_request.of_bundle(str(path))
    return Study(history, history.requests[0], [])


@pytest.mark.parametrize("path", [*BUNDLES, ALTERED], ids=lambda path: path.stem)
async def test_every_history_is_on_every_screen(path: Path) -> None:
    one = await visitor(path)
    [row, *_] = (await one.get("/api/requests"))["rows"]
    at = {"source": row["source"], "id": row["request_id"]}

    request = await one.get("/api/request", **at)
    events = await one.get("/api/events", **at)
    decisions = await one.get("/api/decisions", **at)

    assert request["explained"]["seconds"] == pytest.approx(
        sum(bar["to"] - bar["from"] for bar in request["lanes"][0]["bars"])
    )
    assert events["total"] == len(bundle_file.read(str(path)).records) == len(events["rows"])
    assert all(event["type"] for event in events["rows"])
    for place, event in enumerate(events["rows"]):
        state = await one.get("/api/state", place=place, **at)
        whole = await one.get("/api/event", seq=event["seq"], **at)
        assert state["row"] == event
        assert whole["place"] == place
    assert decisions["decisions"]
    assert (decisions["counts"].keys() <= {"same", "adopted"}) == (path != ALTERED)


async def test_a_changed_decision_is_shown_by_its_leaf() -> None:
    one = await visitor(ALTERED)

    found = await one.get("/api/decisions", source="b1", id="plain")

    [differing] = [row for row in found["decisions"] if row["match"] == "differs"]
    assert differing["type"] == "request.finished"
    [leaf] = differing["differences"]
    assert leaf["field"] == "usage.completion_tokens"
    assert leaf["recorded"] == leaf["decided"] + 1


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
def test_every_decision_and_every_report_has_a_cause_before_it(path: Path) -> None:
    study = study_of(path)

    for row in study.events(0, "", "")["rows"]:
        if row["type"] in (
            "node.ready",
            "walk.completed",
            "request.finished",
            "request.admitted",
            "output.chunk",
        ):
            assert row["cause"] is not None, row
            assert row["cause"] < row["seq"]
            assert row["seq"] in study.effects[row["cause"]]


def test_an_order_leads_to_its_report_and_a_report_to_the_end() -> None:
    study = study_of(HISTORIES / "plain.bundle")
    rows = {row["seq"]: row for row in study.events(0, "", "")["rows"]}
    reports = [row for row in rows.values() if row["type"] == "walk.completed"]
    [end] = [row for row in rows.values() if row["type"] == "request.finished"]

    assert all(rows[row["cause"]]["type"] == "node.ready" for row in reports)
    assert end["cause"] == reports[-1]["seq"]


def test_events_are_found_by_kind_and_by_text() -> None:
    study = study_of(HISTORIES / "worker-died.bundle")
    every = study.events(0, "", "")

    lost = study.events(0, "worker.lost", "")
    assert lost["total"] == every["kinds"]["worker.lost"] == 1
    assert study.events(0, "", "WORKER.LOST")["rows"][0] == lost["rows"][0]
    assert study.events(0, "", "no such text")["total"] == 0
    assert study.events(3, "", "")["rows"] == every["rows"][3:]


@pytest.mark.parametrize("name", ["worker-died", "sound-worker-died", "choices"])
def test_the_changes_of_a_value_are_those_of_a_reader_who_looks_at_every_state(name: str) -> None:
    study = study_of(HISTORIES / f"{name}.bundle")
    count = len(study.history.records)
    whole: dict[str, list[int]] = {}
    for place in range(count):
        for change in study.state(place)["changes"]:
            whole.setdefault(change["name"], []).append(place)

    assert f"{study.request_id}.phase" in whole
    for field, places in whole.items():
        found = [one["place"] for one in study.changes(field)["changes"] if one["place"]]
        assert found == places, field


def test_a_lost_worker_is_an_absence_in_its_rank() -> None:
    lanes = study_of(HISTORIES / "worker-died.bundle").request()["lanes"]
    [rank] = [lane for lane in lanes if lane["kind"] == "rank"]

    away = [bar for bar in rank["bars"] if bar["kind"] == "away"]
    unreported = [bar for bar in rank["bars"] if bar["kind"] == "unreported"]
    assert len(away) == 1
    assert "away" in away[0]["text"]
    assert unreported[-1]["to"] == pytest.approx(away[0]["from"])
    assert {bar["attempt"] for bar in rank["bars"] if bar["kind"] != "away"} == {1, 2}


# ---- lists ---------------------------------------------------------------------------------------------


async def test_the_list_has_every_request_newest_first_and_filters_choose() -> None:
    one = await visitor(*BUNDLES)

    rows = (await one.get("/api/requests"))["rows"]
    assert {row["source_name"] for row in rows} == {path.name for path in BUNDLES}
    assert [int(row["start_ns"]) for row in rows] == sorted(
        (int(row["start_ns"]) for row in rows), reverse=True
    )
    failed = (await one.get("/api/requests", outcome="failed"))["rows"]
    assert {row["outcome"] for row in failed} == {"failed"}
    assert len(failed) == sum(row["outcome"] == "failed" for row in rows)
    codes = {row["code"] for row in failed}
    by_code = (await one.get("/api/requests", code=sorted(codes)))["rows"]
    assert len(by_code) == len(failed)
    rest = (await one.get("/api/requests", **{"not": "outcome=failed"}))["rows"]
    assert len(rest) + len(failed) == len(rows)
    assert (await one.get("/api/requests", text="no prompt says this"))["rows"] == []


@pytest.mark.parametrize(
    ("query", "part"),
    [
        ({"outcome": "nice"}, "nice"),
        ({"slower-than": "soon"}, "duration"),
        ({"since": "soon"}, "time"),
        ({"rank": "x"}, "rank"),
        ({"not": "x"}, "KIND=VALUE"),
        ({"before": "x"}, "number"),
        ({"of": "b9"}, "b9"),
    ],
)
async def test_a_filter_that_cannot_be_is_an_error_that_says_so(query: dict[str, str], part: str) -> None:
    one = await visitor(BUNDLES[0])

    answer = await one.http.get("/api/requests", params=query)

    assert answer.status_code == 400
    assert part in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("request", {}),
        ("request", {"source": "log", "id": "plain"}),
        ("request", {"source": "b1", "id": "other"}),
        ("request", {"source": "b1", "id": "../../etc/passwd"}),
        ("event", {"source": "b1", "id": "plain", "seq": "99"}),
        ("event", {"source": "b1", "id": "plain", "seq": "-1"}),
        ("state", {"source": "b1", "id": "plain", "place": "9" * 30}),
        ("medium", {"source": "b1", "id": "plain", "number": "0"}),
        ("live", {}),
    ],
)
async def test_what_is_not_there_is_an_error_that_says_so(path: str, query: dict[str, str]) -> None:
    one = await visitor(HISTORIES / "plain.bundle")

    answer = await one.http.get(f"/api/{path}", params=query)

    assert answer.status_code == 400
    assert answer.json()["error"]


# ---- bundles -------------------------------------------------------------------------------------------


async def dropped(one: Visitor, data: bytes, name: str = "a.bundle") -> Any:
    headers = CHANGE | {"x-dalsegno-name": name}
    return await one.http.post("/api/bundles", content=data, headers=headers)


async def test_a_dropped_bundle_is_in_the_list() -> None:
    one = await visitor()

    answer = await dropped(one, BUNDLES[0].read_bytes(), "r%C3%A9sum%C3%A9.bundle")

    assert answer.status_code == 200
    [row] = (await one.get("/api/requests"))["rows"]
    assert row["source_name"] == "r\u00e9sum\u00e9.bundle"
    assert row["request_id"] in answer.json()["requests"]


@pytest.mark.parametrize("data", [b"", b"{}", b"\x00\xff", BUNDLES[0].read_bytes()[:-40]])
async def test_a_file_that_is_no_bundle_is_refused(data: bytes) -> None:
    one = await visitor()

    answer = await dropped(one, data)

    assert answer.status_code == 400
    assert "a.bundle" in answer.json()["error"]
    assert (await one.get("/api/requests"))["rows"] == []


# ---- media ---------------------------------------------------------------------------------------------


def recorded(data: bytes, metadata: dict[str, Any], modality: str) -> Study:
    records = histories.answered(data=data, metadata=metadata, modality=modality)
    history = recorded_request.of_log(histories.collected(records))
    return Study(history, "r1", [])


async def test_sound_is_a_wav_file_that_can_be_asked_for_in_parts() -> None:
    pcm = bytes(range(200)) * 2
    study = recorded(pcm, {"sample_rate": 16_000, "num_channels": 1}, "audio")
    shelf = Shelf()
    shelf.bundles["b1"] = BundleRecording("b1", "made", study.history)
    one = Visitor(shelf)
    await one.enter()
    at = {"source": "b1", "id": "r1", "number": "0"}

    whole = await one.http.get("/api/medium", params=at)
    part = await one.http.get("/api/medium", params=at, headers={"range": "bytes=10-19"})

    assert whole.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(whole.content)) as file:
        assert (file.getframerate(), file.readframes(1000)) == (16_000, pcm)
    assert part.status_code == 206
    assert part.content == whole.content[10:20]
    [medium] = (await one.get("/api/request", source="b1", id="r1"))["media"]
    assert medium["seconds"] == len(pcm) / 2 / 16_000
    assert medium["times"][-1][1] == len(pcm) / 2


def test_raw_pixels_become_a_png_file_and_a_script_is_not_shown() -> None:
    pixels = bytes([255, 0, 0]) * 4
    [image] = recorded(pixels, {"dtype": "uint8", "shape": [2, 2, 3]}, "image").made
    [drawing] = recorded(b"<svg onload=alert(1)>", {"content_type": "image/svg+xml"}, "image").made
    [page] = recorded(b"<script>alert(1)</script>", {"content_type": "text/html"}, "image").made

    assert image.content_type == "image/png"
    assert image.data is not None
    assert image.data.startswith(b"\x89PNG")
    for one in (drawing, page):
        assert one.data is None
        assert one.why_not is not None
        assert one.content_type not in media.SHOWN


def test_sound_that_is_not_in_a_bundle_is_said() -> None:
    [sound] = study_of(HISTORIES / "speech.bundle").made

    assert sound.data is None
    assert sound.why_not is not None
    assert "--payloads" in sound.why_not


def test_a_png_file_is_what_other_readers_read() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels = bytes(range(36))

    image = pillow.open(io.BytesIO(media.png(pixels, 4, 3)))

    assert image.size == (4, 3)
    assert image.convert("RGB").tobytes() == pixels
    assert base64.b64encode(media.png(pixels, 4, 3)).startswith(b"iVBOR")


# ---- comparison and cluster ----------------------------------------------------------------------------


async def test_a_request_compared_with_itself_has_no_difference() -> None:
    one = await visitor(HISTORIES / "plain.bundle")

    found = await one.get("/api/compare", source="b1", id="plain", source2="b1", id2="plain")

    assert [edge for edge in found["edges"] if edge.get("diverges")] == []
    assert all(text["parts_at"] is None for text in found["texts"])
    assert all(row["a"] == row["b"] is not None for row in found["events"])
    assert all(a == b for one_kind in found["kinds"] for a, b in [one_kind["seconds"]])


async def test_a_request_with_a_lost_worker_is_compared_with_one_without() -> None:
    one = await visitor(HISTORIES / "plain.bundle", HISTORIES / "worker-died.bundle")

    found = await one.get("/api/compare", source="b1", id="plain", source2="b2", id2="worker-died")

    only_b = [row["b"]["type"] for row in found["events"] if row["a"] is None]
    assert {"worker.lost", "output.fence", "request.resumed"} <= set(only_b)
    both = [row for row in found["events"] if row["a"] and row["b"]]
    assert all(row["a"]["type"] == row["b"]["type"] for row in both)
    assert {row["a"]["type"] for row in both} >= {"request.submitted", "request.admitted", "node.ready"}
    assert next(kind for kind in found["kinds"] if kind["kind"] == "away")["seconds"][0] == 0
    [text] = found["texts"]
    a, b = text["texts"]
    assert a[: text["parts_at"]] == b[: text["parts_at"]]
    assert a[text["parts_at"] :][:1] != b[text["parts_at"] :][:1]


async def test_the_cluster_is_that_of_the_state_at_every_position_in_any_order() -> None:
    path = HISTORIES / "worker-died.bundle"
    one, study = await visitor(path), study_of(path)
    places = [*range(len(study.history.records)), 3, 0, len(study.history.records) - 1]

    for place in places:
        record = study.history.records[place]
        found = await one.get("/api/cluster", source="b1", at=record.seq)
        state = study.state(place)["state"]
        phase = state.get("worker-died", {}).get("phase")
        assert found["seq"] == record.seq
        assert found["epoch"] == state["world"]["epoch"]
        assert {str(rank["rank"]): rank["incarnation"] for rank in found["ranks"]} == {
            rank: value["incarnation"] for rank, value in state["world"]["ranks"].items()
        }
        open_phases = {row["request_id"]: row["phase"] for row in found["requests"]}
        assert open_phases == ({"worker-died": phase} if phase in ("waiting", "running", "held") else {})
    assert found["ended"] == {"finished": 1}


async def test_the_range_of_a_recording_is_that_of_its_records() -> None:
    one = await visitor(HISTORIES / "plain.bundle")
    records = bundle_file.read(str(HISTORIES / "plain.bundle")).records

    assert await one.get("/api/range", source="b1") == {
        "first_seq": records[0].seq,
        "last_seq": records[-1].seq,
    }
