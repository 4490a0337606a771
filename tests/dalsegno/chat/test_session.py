"""Sessions against a server that is a script: what is asked, kept, shown and saved."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dalsegno.ask.server import Server
from dalsegno.chat.conversation import Conversation
from dalsegno.chat.session import Session
from shared.errors import ClientError
from tests.gateway.media.world import png


class Scripted(Server):
    """A server whose answers are given: pieces, or an error to raise behind them."""

    answers: list[list[Any]]
    asked: list[dict[str, Any]]

    @contextmanager
    def request(self, method: str, path: str, body: Any = None, headers: Any = None) -> Iterator[Any]:
        assert (method, path) == ("POST", "/v1/chat/completions")
        self.asked.append(json.loads(body))
        yield None

    def events(self, response: Any) -> Iterator[dict[str, Any]]:
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            delta = piece if isinstance(piece, dict) else {"content": piece}
            yield {"choices": [{"delta": delta}]}


def talk(lines: list[Any], answers: list[list[Any]], **fields: Any) -> tuple[Scripted, list[str], list[str]]:
    """The server, what was shown of answers, and what was said."""
    server = Scripted(url="http://x")
    object.__setattr__(server, "answers", answers)
    object.__setattr__(server, "asked", [])
    rest = iter(lines)

    def read_line(_: str) -> str:
        line = next(rest, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    shown: list[str] = []
    said: list[str] = []
    Session(
        server=server,
        model="demo",
        read_line=read_line,
        show=lambda piece, is_thought: shown.append(f"({piece})" if is_thought else piece),
        say=said.append,
        **fields,
    ).run()
    return server, shown, said


def test_each_message_is_asked_with_the_conversation_so_far() -> None:
    server, shown, _ = talk(
        ["a", "/system Be brief.", "b", "", "/clear", "c"],
        [["A", "a"], ["B"], ["C"]],
        fields={"temperature": 0.5},
    )

    assert [[m["content"] for m in body["messages"]] for body in server.asked] == [
        ["a"], ["Be brief.", "a", "Aa", "b"], ["Be brief.", "c"],
    ]  # fmt: skip
    assert all(body["temperature"] == 0.5 and body["stream"] for body in server.asked)
    assert "".join(shown) == "Aa\nB\nC\n"


def test_thoughts_are_shown_apart_and_sent_back() -> None:
    thought = {"reasoning_content": "hm"}
    server, shown, _ = talk(["a", "/think off", "b"], [[thought, "A"], ["B"]])

    assert shown[:4] == ["(hm)", "(\n\n)", "A", "\n"]
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "A", "reasoning_content": "hm"}
    assert server.asked[1]["enable_thinking"] is False


def test_ctrl_c_stops_the_answer_and_not_the_session() -> None:
    server, shown, said = talk(["a", KeyboardInterrupt(), "b"], [["A", KeyboardInterrupt()], ["B"]])

    assert [message["content"] for message in server.asked[1]["messages"]] == ["a", "A", "b"]
    assert "".join(shown) == "A\nB\n"
    assert said == ["stopped", "Ctrl-D, or /quit, ends the session"]


def test_a_refused_message_is_not_kept() -> None:
    server, _, said = talk(["a", "b"], [[ClientError("too long")], ["B"]])

    assert said == ["Error: too long"]
    assert [message["content"] for message in server.asked[1]["messages"]] == ["b"]


def test_a_file_goes_with_the_next_message(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(png())

    server, _, said = talk([f"/file {picture}", "What is it?", "And now?"], [["A"], ["B"]])

    first = server.asked[0]["messages"][0]["content"]
    assert [part["type"] for part in first] == ["file", "text"]
    assert server.asked[1]["messages"][-1]["content"] == "And now?"
    assert said == ["a.png goes with the next message"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nope", "/nope is no command"),
        ("/file", "/file: expected the path of a file, found nothing"),
        ("/file /does/not/exist", "found /does/not/exist"),
        ("/save", "/save: expected the path"),
        ("/save /does/not/exist/x.md", "cannot be written"),
        ("/think maybe", "/think: expected on or off, found maybe"),
    ],
)
def test_a_wrong_command_is_one_line(line: str, says: str) -> None:
    _, _, said = talk([line], [])

    assert len(said) == 1
    assert says in said[0]


@pytest.mark.parametrize("name", ["quit", "exit", "q", "bye"])
def test_a_session_ends(name: str) -> None:
    server, _, _ = talk([f"/{name}", "a"], [])

    assert server.asked == []


def test_a_conversation_is_saved(tmp_path: Path) -> None:
    conversation = Conversation(system="Be brief.")
    conversation.add([{"type": "file", "file": {"filename": "a.png"}}, {"type": "text", "text": "a"}], "A")
    conversation.add("b", "B", "hm", is_stopped=True)

    conversation.save(tmp_path / "a.md")
    conversation.save(tmp_path / "a.json")

    assert (tmp_path / "a.md").read_text().split("\n\n") == [
        "**System**: Be brief.", "**You**: [a.png] a", "**Model**: A", "**You**: b",
        "**Model**: B (stopped)\n",
    ]  # fmt: skip
    saved = json.loads((tmp_path / "a.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[-1]["reasoning_content"] == "hm"
