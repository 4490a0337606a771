"""A conversation: its turns, and what the next request sends. Pure, except that it saves transcripts."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shared.errors import ClientError

JSON: Final = ".json"
STOPPED: Final = "(stopped)"
"""The note in a transcript behind an answer that was stopped."""


@dataclass(slots=True)
class Conversation:
    """The turns so far.

    Attributes:
        system: the system's message; empty for none.
        turns: the messages of the user and the assistant, as the server takes them.
        stopped: the indices of answers that were stopped.
    """

    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)

    def with_question(self, content: Any) -> list[dict[str, Any]]:
        """The messages of a request that asks this."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": content}]

    def add(self, content: Any, answer: str, thought: str = "", *, is_stopped: bool = False) -> None:
        """Keep a question, and its answer as far as it came."""
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if thought:
            message["reasoning_content"] = thought
        self.turns += [{"role": "user", "content": content}, message]
        if is_stopped:
            self.stopped.add(len(self.turns) - 1)

    def clear(self) -> None:
        """Forget all turns; the system's message stays."""
        self.turns.clear()
        self.stopped.clear()

    def save(self, path: Path) -> None:
        """Write a transcript: messages as JSON, or Markdown for any other name.

        Raises:
            ClientError: the file cannot be written.
        """
        text = self._json() if path.suffix == JSON else self._markdown()
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClientError(f"{path}: cannot be written: {error.strerror}") from error

    def _json(self) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return json.dumps([*system, *self.turns], ensure_ascii=False, indent=1) + "\n"

    def _markdown(self) -> str:
        parts = [f"**System**: {self.system}"] if self.system else []
        for number, turn in enumerate(self.turns):
            who = "You" if turn["role"] == "user" else "Model"
            text = text_of(turn["content"])
            parts.append(f"**{who}**: {text}{f' {STOPPED}' if number in self.stopped else ''}")
        return "\n\n".join(parts) + "\n"


def text_of(content: Any) -> str:
    """The text of a message; a file in it is its name."""
    if isinstance(content, str):
        return content
    return " ".join(
        part["text"] if part["type"] == "text" else f"[{part['file'].get('filename', 'a file')}]"
        for part in content
    )
