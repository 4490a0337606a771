"""The filters for a long backlog, and the records that a reader keeps."""

from pathlib import Path

import pytest

from shared.log.nats import subject_filter
from shared.log.nats.jetstream import connect, provision
from shared.log.nats.private_server import NatsServer
from shared.subjects import Subjects

SUBJECTS = Subjects("ds")


def test_one_filter_covers_all_subjects_of_a_reader() -> None:
    assert subject_filter.covering_filter(SUBJECTS.for_conductor()) == "ds.>"
    assert subject_filter.covering_filter(["ds.output.a.r1.*", "ds.output.b.r1.*"]) == "ds.output.>"
    assert subject_filter.covering_filter(["ds.output.*.r1.w0", "ds.output.*.r2.w0"]) == "ds.output.>"


def test_the_sieve_keeps_what_the_filters_mean() -> None:
    wants = subject_filter.matcher(["ds.walk.>", "ds.output.*.*.conductor", "ds.request.r+1"])
    kept = [b"ds.walk.r1", b"ds.walk.r1.more", b"ds.output.g-1.r1.conductor", b"ds.request.r+1"]
    dropped = [b"ds.walk", b"ds.walks.r1", b"dsxwalk.r1", b"ds.output.g-1.r1.w0", b"ds.request.rr1"]

    assert all(wants(subject) for subject in kept)
    assert not any(wants(subject) for subject in dropped)


@pytest.mark.parametrize(
    ("subjects", "behind", "wanted"),
    [
        (["ds.walk.>"], 100_000, 100_000),  # one filter is quick as it is
        (["ds.walk.>", "ds.done.>"], 1_000, 1_000),  # not far
        (["ds.walk.>", "ds.done.>"], 100_000, 12),  # hardly anything of it
    ],
)
def test_where_it_does_not_pay_a_reader_gets_its_own_filters(
    subjects: list[str], behind: int, wanted: int
) -> None:
    assert not subject_filter.wide_filter_pays(subjects, behind, wanted)
    assert subject_filter.wide_filter_pays(["ds.walk.>", "ds.done.>"], 100_000, 50_000)


@pytest.mark.processes
async def test_a_reader_far_behind_gets_its_records_each_once_and_then_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject_filter, "FAR_BEHIND", 5)
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        await provision(server.url, server.credentials, SUBJECTS)
        log = await connect(server.url, credentials=server.credentials, subjects=SUBJECTS, name="test")
        for number in range(30):
            kind = (SUBJECTS.walk, SUBJECTS.request, SUBJECTS.control)[number % 3]
            log.post(kind("r1"), b"%d" % number)
        await log.drain()
        wanted = [number for number in range(30) if number % 3 != 2]
        reading = [SUBJECTS.walk("*"), SUBJECTS.request("*")]

        assert [int(record.data) async for record in log.history(reading)] == wanted
        assert [int(record.data) async for record in log.history(reading, 4, 20)] == wanted[2:14]

        records = log.read(reading, 1)
        assert [int((await anext(records)).data) for _ in wanted] == wanted
        log.post(SUBJECTS.control("r1"), b"not for this reader")
        log.post(SUBJECTS.walk("r1"), b"30")
        assert int((await anext(records)).data) == 30
        await records.aclose()
        await log.close()
    finally:
        server.kill()
