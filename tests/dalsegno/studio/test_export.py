"""The exported file: whole, loads nothing, and nothing in its data can end the element that it is in."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli import main
from dalsegno.replay import recorded_request
from dalsegno.studio import export
from dalsegno.studio.recordings import BundleRecording, Row
from dalsegno.studio.study import Study
from tests.dalsegno import histories
from tests.dalsegno.studio.pages import HISTORIES

MAX_BYTES = 120_000
"""Of everything but the data."""


def exported(text: str) -> str:
    """The file of one request with this prompt."""
    history = recorded_request.of_log(histories.collected(histories.answered(text)))
    recording = BundleRecording("b1", "made", history)
    [summary] = recording.summaries
    row = Row(source="b1", source_name=text, summary=summary)
    return export.document([row], [("b1", Study(history, "r1", []))], text)


def data_of(document: str) -> dict[str, dict[str, object]]:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', document, re.DOTALL)
    found: dict[str, dict[str, object]] = json.loads(data)
    return found


def test_it_has_every_screen_of_every_request(tmp_path: Path) -> None:
    file = tmp_path / "all.html"
    bundles = [str(HISTORIES / f"{name}.bundle") for name in ("plain", "choices")]

    result = CliRunner().invoke(main, ["studio", *bundles, "--export", str(file)])

    assert result.exit_code == 0, result.output
    assert "4 requests" in result.output
    answers = data_of(file.read_text(encoding="utf-8"))["answers"]
    for source, request_id in (("b1", "plain"), ("b2", "choices"), ("b2", "choices-2")):
        for what in ("request", "events", "decisions"):
            assert f"{what}\n{source}\n{request_id}\n" in answers
        assert f"state\n{source}\n{request_id}\n0" in answers


def test_one_request_of_several_can_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "one.html"
    folder = str(HISTORIES)

    result = CliRunner().invoke(main, ["studio", folder, "--request", "poison", "--export", str(file)])

    assert result.exit_code == 0, result.output
    assert "1 request," in result.output
    assert "worker-died" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--request", "poison"], "--export"),
        (["--request", "nobody", "--export", "x.html"], "nobody"),
    ],
)
def test_what_cannot_be_exported_is_said(arguments: list[str], part: str) -> None:
    result = CliRunner().invoke(main, ["studio", str(HISTORIES), *arguments])

    assert result.exit_code in (1, 2)
    assert part in result.output
    assert not Path("x.html").exists()


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "]]>", "&lt;/script&gt;"]
)
def test_no_text_ends_the_element_that_it_is_in(text: str) -> None:
    document = exported(text)

    assert document.count("</script>") == 2
    assert document.count("<script") == 2
    assert text in json.dumps(data_of(document), ensure_ascii=False)


def test_the_policy_allows_the_script_and_the_style_of_the_file_and_nothing_else() -> None:
    document = exported("What?")
    [policy] = re.findall(r'content-security-policy" content="([^"]*)"', document)

    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", document.partition("<script")[0])


def test_the_pages_are_small() -> None:
    files = [path for path in export.STATIC.iterdir() if path.suffix in (".js", ".css", ".html")]

    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    assert len(export.bundled_script()) < MAX_BYTES


def test_every_module_is_in_the_script_once_and_after_those_it_imports() -> None:
    script = export.bundled_script()
    modules = [path.name for path in export.STATIC.glob("*.js") if path.name != export.ENTRY]

    for name in modules:
        assert script.count(f'modules["{name}"] = ') == 1
        assert script.index(f'modules["{name}"] = ') < script.index(f'= modules["{name}"];')


def test_a_request_with_too_many_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_RECORDS", 5)

    with pytest.raises(Exception, match="at most 5 records"):
        exported("What?")
