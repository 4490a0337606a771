"""The form of a log line, and the parts of a client's text in it."""

import json
import logging
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.deployment import LogSettings
from dalsegno.roles import logging_setup
from shared.telemetry.log_fields import MAY_QUOTE, PROMPT, correlated, quoting

SECRET = "what a client wrote"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is the process's: leave it as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in logging_setup._CHATTY}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.captureWarnings(capture=False)


class Printed:
    """The lines that a process with this log setup prints."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], role: str | None = "gateway", **settings: Any
    ) -> None:
        logging_setup.set_up(LogSettings(**settings), role)
        self._capsys = capsys
        self.log = logging.getLogger("gateway.test")

    @property
    def text(self) -> str:
        return self._capsys.readouterr().err

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


def test_a_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys)
    printed.log.info("listening on %s", "http://x")

    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} gateway INFO  listening on http://x\n", printed.text
    )


def test_a_line_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, format="json")
    with correlated("web-7", is_clients=True):
        printed.log.warning("two\nlines", extra={"status": 200, "request_id": "r-1"})

    [found] = printed.objects
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "warning", "role": "gateway", "logger": "gateway.test", "message": "two\nlines",
        "correlation": "web-7", "status": 200, "request_id": "r-1",
    }  # fmt: skip


def test_the_level_is_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for level, expected in (("info", 2), ("error", 1)):
        printed = Printed(capsys, level=level)
        printed.log.debug("a")
        printed.log.info("b")
        printed.log.error("c")
        assert len(printed.text.splitlines()) == expected


def test_what_libraries_say_at_info_is_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    for level, is_said in (("info", False), ("debug", True)):
        printed = Printed(capsys, level=level)
        logging.getLogger("httpx.pool").info("cache stats")
        assert ("cache stats" in printed.text) == is_said
        # Once imported, torch prints its own lines: only the level is checked.
        assert logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.INFO) == is_said


@pytest.mark.parametrize("format_", ["human", "json"])
@pytest.mark.parametrize("prompts", [False, True])
def test_what_a_client_wrote_is_there_only_if_told(
    capsys: pytest.CaptureFixture[str], format_: str, prompts: bool
) -> None:
    printed = Printed(capsys, format=format_, prompts=prompts)
    printed.log.warning("record 3 is no event", extra=quoting(SECRET))
    quoted = printed.text
    printed.log.info("request r asks %r", SECRET, extra=PROMPT)
    asked = printed.text
    try:
        _fail()
    except ExceptionGroup:
        printed.log.exception("a bug", extra=MAY_QUOTE)
        logging.getLogger("uvicorn.error").exception("somebody else's words")
    bugs = printed.text

    assert "record 3 is no event" in quoted
    assert "a bug" in bugs
    assert "_fail" in bugs
    assert "KeyError" in bugs
    for text in (quoted, asked, bugs):
        assert (SECRET in text) is prompts


def test_our_own_errors_are_shown_with_their_messages(capsys: pytest.CaptureFixture[str]) -> None:
    for format_ in ("human", "json"):
        printed = Printed(capsys, format=format_)
        try:
            raise RuntimeError("no room on the device")
        except RuntimeError:
            printed.log.exception("the engine failed")
        assert "no room on the device" in printed.text


def test_the_errors_of_every_package_are_ours() -> None:
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

    assert set(packages) == logging_setup.OURS


def test_records_from_before_the_setup_have_the_form_of_all_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_setup.held_back() as records:
        logging.getLogger("configs.checks").warning("an old %s", "name")
    printed = Printed(capsys, format="json")
    assert not printed.text

    logging_setup.repeat(records)

    assert [(one["logger"], one["message"]) for one in printed.objects] == [("configs.checks", "an old name")]


def test_records_from_before_the_setup_are_printed_if_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        logging.getLogger("configs.checks").warning("an old %s", "name")
        raise ValueError("no config")

    with pytest.raises(ValueError, match="no config"), logging_setup.held_back():
        fail()

    assert capsys.readouterr().err == "an old name\n"


def test_a_line_for_programs_is_one_line_also_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, format="json")
    try:
        _fail()
    except ExceptionGroup:
        printed.log.exception("a bug")

    [found] = printed.objects
    assert found["exception"].splitlines()[0].endswith("Traceback (most recent call last):")
    assert "exc_info" not in found


@pytest.mark.parametrize("prompts", [False, True])
def test_nothing_steers_the_terminal(capsys: pytest.CaptureFixture[str], prompts: bool) -> None:
    printed = Printed(capsys, prompts=prompts)
    printed.log.info("model %s", "\x1b[2J")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        printed.log.exception("odd")

    assert "\x1b" not in printed.text


def test_a_message_is_cut_where_it_is_endless(capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, format="json", prompts=True)
    printed.log.info("request r asks %r", "x" * 10**6, extra=PROMPT)

    assert len(printed.text) < 20_000


def test_libraries_are_heard_from_warnings_on_unless_debugged(capsys: pytest.CaptureFixture[str]) -> None:
    for level, heard in (("info", False), ("debug", True)):
        printed = Printed(capsys, level=level)
        logging.getLogger("nats").info("chatter")
        assert ("chatter" in printed.text) is heard


def test_warnings_of_python_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printed = Printed(capsys, format="json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.showwarning("old", DeprecationWarning, "x.py", 1, file=None)

    [found] = printed.objects
    assert found["level"] == "warning"


@pytest.mark.parametrize("format_", ["human", "json"])
def test_the_last_word_is_as_every_line_is(capsys: pytest.CaptureFixture[str], format_: str) -> None:
    printed = Printed(capsys, format=format_)
    logging_setup.print_last_message("Error: no such model")

    text = printed.text
    assert text == "Error: no such model\n" if format_ == "human" else json.loads(text)["level"] == "critical"
    assert "Error: no such model" in text


def _fail() -> None:
    try:
        dict[str, int]()[SECRET]
    except KeyError as error:
        raise ExceptionGroup(SECRET, [ValueError(SECRET), KeyError(SECRET)]) from error
