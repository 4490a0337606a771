"""`dalsegno chat` with a real deployment: from a pipe, and on a terminal, where Ctrl-C stops an answer."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

from tests.e2e import clients
from tests.e2e.deploy import Running

_LOST_S = 5.0
LEN = "Return the number of items in a container."


def command(running: Running, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "dalsegno", "chat", "--url", running.url, *arguments]


def test_messages_from_a_pipe_are_answered(deployment: Running, tmp_path: Path) -> None:
    saved = tmp_path / "talk.md"
    done = subprocess.run(
        command(deployment, "--temperature", "0"),
        input=f"What does len do?\n/save {saved}\n",
        capture_output=True,
        text=True,
        timeout=clients.PATIENCE_S,
        check=True,
    )

    assert done.stdout == f"{LEN}\n"
    assert saved.read_text() == f"**You**: What does len do?\n\n**Model**: {LEN}\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(random_deployment: Running, tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    # Python has no Ctrl-C where the parent ignores the signal, as shells do for jobs in the background.
    with_signal = ["env", "--default-signal=INT", "setsid", "--ctty"]
    process = subprocess.Popen(
        [*with_signal, *command(random_deployment, "--max-tokens", "480", "--temperature", "1")],
        stdin=side,
        stdout=side,
        stderr=side,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"},
    )
    os.close(side)
    try:
        screen = Screen(terminal)
        screen.wait_for("/help lists the commands")
        while True:  # an answer may have ended before the key is pressed: then another one is stopped
            os.write(terminal, b"hello\n")
            screen.wait_for("hello")
            screen.wait_for_answer(40)
            if screen.press_until("stopped", "ends the session") == "stopped":
                break
        os.write(terminal, b"/system\n")
        screen.wait_for("there is no system's message")
        os.write(terminal, b"/quit\n")
        assert process.wait(clients.PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    os.close(terminal)

    lines = (tmp_path / "dalsegno" / "chat_history").read_text().splitlines()
    assert (lines[0], lines[-2:]) == ("hello", ["/system", "/quit"])


class Screen:
    """What a terminal has shown behind the last text that was waited for."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._shown = ""

    def wait_for(self, *texts: str) -> str:
        """Wait for one of the texts, and return it."""
        while not (found := [text for text in texts if text in self._shown]):
            self._read()
        self._shown = self._shown.partition(found[0])[2]
        return found[0]

    def press_until(self, *texts: str) -> str:
        """Press Ctrl-C until one of the texts is there: a key may be lost while the terminal changes."""
        while True:
            os.write(self._terminal, b"\x03")
            while select.select([self._terminal], [], [], _LOST_S)[0]:
                self._read()
                if any(text in self._shown for text in texts):
                    return self.wait_for(*texts)

    def wait_for_answer(self, count: int) -> None:
        """Wait for so many characters of an answer, or for the prompt behind a shorter one."""
        while len(self._shown) < count and "\n> " not in self._shown:
            self._read()

    def _read(self) -> None:
        data = os.read(self._terminal, 4096)
        assert data, f"expected more, found the end behind {self._shown!r}"
        self._shown += data.decode(errors="replace")
