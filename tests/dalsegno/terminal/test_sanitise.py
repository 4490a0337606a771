import logging

import pytest

from configs.deployment import LogSettings
from dalsegno.roles import logging_setup
from dalsegno.terminal.sanitise import plain


def test_what_is_printed_stays_as_it_is() -> None:
    assert plain("naïve 🎼 'x' \\n") == "naïve 🎼 'x' \\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jx", r"\x1b[2Jx"),
        ("a\r\nb", r"a\r\nb"),
        ("\x9b1m", r"\x9b1m"),
        ("\u2028\u202e", r"\u2028\u202e"),
    ],
)
def test_what_would_steer_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_client_cannot_write_a_line_of_its_own_into_our_log(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        logging_setup.set_up(LogSettings(), "test")
        logging.getLogger("t").info(
            "refused: %s", "\x1b[2J\n2026-11-20 09:13:38.123 gateway INFO  all is well"
        )
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(capture=False)
    [line] = capsys.readouterr().err.splitlines()
    assert r"refused: \x1b[2J\n2026" in line
