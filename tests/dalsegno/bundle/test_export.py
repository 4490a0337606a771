import hashlib
import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.bundle import bundle_file, export, record_rewriter
from dalsegno.cli import main
from dalsegno.history import request_media
from dalsegno.history.request_media import RecordedMedium
from dalsegno.history.request_records import RequestRecords
from dalsegno.replay import recorded_request
from shared.events import Media
from tests.dalsegno.histories import answered, collected

PICTURE = Media(modality="image", digest=hashlib.sha256(b"pixels").hexdigest(), size=6, name="cat.png")
GONE = Media(modality="image", digest="0" * 64, size=7)
FILES = [PICTURE, PICTURE, GONE]


@pytest.fixture(autouse=True)
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A log with one request, and a folder of one's own."""

    async def collect(*_: object, with_media: bool) -> tuple[RequestRecords, list[RecordedMedium]]:
        found = collected(answered(data=b"sound", files=FILES))
        named = request_media.named_media(found.records, found.subjects)
        return found, request_media.with_bytes(named, {PICTURE.digest: b"pixels"} if with_media else {})

    monkeypatch.setattr(export, "_collected", collect)
    monkeypatch.chdir(tmp_path)


def exported(*args: str) -> Result:
    return CliRunner().invoke(main, ["export", "r1", *args])


def test_a_bundle_is_named_after_its_request_and_is_its_owners_alone() -> None:
    assert exported().stdout.startswith("r1.bundle: 12 events of r1, ")
    assert stat.S_IMODE(Path("r1.bundle").stat().st_mode) == 0o600
    assert bundle_file.read("r1.bundle").header.request_id == "r1"


def test_what_was_left_out_is_said() -> None:
    assert "  5 bytes of sound or images are left out; --payloads keeps them" in exported().stdout
    assert "left out" not in exported("--payloads").stdout


def test_media_are_named_and_with_payloads_each_is_there_once() -> None:
    without = exported()
    assert "  image cat.png (6 bytes) is left out; --payloads keeps it" in without.stderr
    found = bundle_file.read("r1.bundle")
    assert found.media == {}
    [about] = found.header.about
    assert [one["digest"] for one in about["media"]] == [one.digest for one in FILES]

    told = exported("--payloads")
    assert "  image 0000000000000000 (7 bytes) is gone: the media store no longer has it" in told.stderr
    assert bundle_file.read("r1.bundle").media == {PICTURE.digest: b"pixels"}
    media = recorded_request.of_bundle("r1.bundle").media
    assert [(one.medium, one.data) for one in media] == [(PICTURE, b"pixels"), (GONE, None)]


def test_nothing_of_a_medium_is_left_when_redacted() -> None:
    exported("--redact")
    text = Path("r1.bundle").read_text()
    assert PICTURE.digest not in text
    assert "cat.png" not in text
    one, other = (medium.medium for medium in recorded_request.of_bundle("r1.bundle").media)
    assert (one.size, other.size) == (6, 7)
    assert one.digest != other.digest


def test_it_can_be_told_to_programs() -> None:
    told = json.loads(exported("--json", "-o", "x.bundle").stdout)
    assert told["file"] == "x.bundle"
    assert told["bytes"] == Path("x.bundle").stat().st_size
    assert (told["records"], told["requests"], told["payloads"]) == (12, ["r1"], "left out")


def test_on_stdout_there_is_nothing_but_the_bundle(tmp_path: Path) -> None:
    found = exported("-o", "-")
    (tmp_path / "piped.bundle").write_bytes(found.stdout_bytes)
    assert len(bundle_file.read("piped.bundle").kept) == 12
    assert found.stderr.startswith("-: 12 events of r1, ")


def test_an_earlier_one_is_replaced_as_a_whole_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    exported()
    before = Path("r1.bundle").read_bytes()

    def broken(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_file, "write", broken)
    found = exported("--payloads")
    assert (found.exit_code, found.stderr) == (1, "Error: cannot write r1.bundle: No space left on device\n")
    assert Path("r1.bundle").read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["r1.bundle"]


def test_a_folder_that_is_not_there_is_one_line() -> None:
    found = exported("-o", "nowhere/r1.bundle")
    assert found.exit_code == 1
    assert found.stderr == "Error: cannot write nowhere/r1.bundle: No such file or directory\n"


def test_payloads_of_what_is_redacted_are_a_contradiction() -> None:
    found = exported("--payloads", "--redact")
    assert found.exit_code == 2
    assert "contradict one another" in found.stderr


def test_a_request_that_its_bundle_cannot_be_replayed_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_rewriter, "unfaithful", lambda *_, **__: {"r1": "its plan goes by a text"})
    assert "  r1 cannot be replayed from it: its plan goes by a text" in exported("--redact").stdout
    found = CliRunner().invoke(main, ["replay", "r1.bundle"])
    assert found.exit_code == 1
    assert "r1: cannot be replayed: its bundle has other contents than its log" in found.stdout
