"""The loop of `dalsegno chat`: reads an entry, asks the server, and shows the answer as it arrives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dalsegno.ask.chat import deltas, store_file
from dalsegno.ask.files import message_content
from dalsegno.ask.server import Server
from dalsegno.chat.conversation import Conversation
from dalsegno.chat.reader import Command, ReadLine, read_entry
from shared.errors import ClientError, DalSegnoError

HELP: Final = '''\
/system TEXT   set the system's message; without TEXT show it, `/system -` removes it
/file PATH     an image, audio or a video for the next message
/think on|off  let a model that thinks do so, or not
/save PATH     write the conversation: Markdown, or JSON for a name that ends with .json
/clear         forget the conversation
/quit          end (or Ctrl-D)
A line that ends with \\ continues; """ begins and ends a message of several lines.
Ctrl-C stops an answer.'''


@dataclass(slots=True)
class Session:
    """One session.

    Attributes:
        read_line: reads a line of the user.
        show: shows a piece of an answer; `is_thought` for one of what the model thinks.
        say: shows a line of our own.
        fields: further fields of each request, such as `temperature`.
    """

    server: Server
    model: str
    read_line: ReadLine
    show: Callable[[str, bool], None]
    say: Callable[[str], None]
    fields: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    _files: list[Path] = field(default_factory=list)

    def run(self) -> None:
        """Read and answer until the user ends the session."""
        while True:
            try:
                entry = read_entry(self.read_line)
            except KeyboardInterrupt:
                self.say("Ctrl-D, or /quit, ends the session")
                continue
            except EOFError:
                return
            if isinstance(entry, Command) and entry.name in ("quit", "exit", "q", "bye"):
                return
            try:
                if isinstance(entry, Command):
                    self._obey(entry)
                elif entry:
                    self._ask(entry)
            except DalSegnoError as error:
                self.say(f"Error: {error.message}")

    # ---- commands ----------------------------------------------------------------------------------------
    def _obey(self, command: Command) -> None:
        match command.name:
            case "help" | "?":
                self.say(HELP)
            case "system":
                self._set_system(command.rest)
            case "file":
                path = Path(command.rest).expanduser()
                if not command.rest or not path.is_file():
                    raise ClientError(
                        f"/file: expected the path of a file, found {command.rest or 'nothing'}"
                    )
                self._files.append(path)
                self.say(f"{path.name} goes with the next message")
            case "think" if command.rest in ("on", "off"):
                self.fields["enable_thinking"] = command.rest == "on"
            case "think":
                raise ClientError(f"/think: expected on or off, found {command.rest or 'nothing'}")
            case "save":
                if not command.rest:
                    raise ClientError("/save: expected the path of a file, found nothing")
                self.conversation.save(Path(command.rest).expanduser())
                self.say(f"saved as {command.rest}")
            case "clear":
                self.conversation.clear()
                self._files.clear()
            case name:
                raise ClientError(f"/{name} is no command; /help lists them")

    def _set_system(self, text: str) -> None:
        if not text:
            self.say(self.conversation.system or "there is no system's message")
            return
        self.conversation.system = "" if text == "-" else text

    # ---- answers -----------------------------------------------------------------------------------------
    def _ask(self, text: str) -> None:
        """Ask; what the server refuses is not kept, and can be asked again."""
        content = message_content(text, self._files, lambda *file: store_file(self.server, *file))
        answer: list[str] = []
        thought: list[str] = []
        is_stopped = False
        try:
            for kind, piece in self._pieces(content):
                is_thought = kind == "reasoning_content"
                if thought and not is_thought and not answer:
                    self.show("\n\n", True)
                (thought if is_thought else answer).append(piece)
                self.show(piece, is_thought)
        except KeyboardInterrupt:  # the connection is closed by now, and the server stops
            is_stopped = True
        finally:
            if answer or thought:
                self.show("\n", False)
        if is_stopped:
            self.say("stopped")
        self._files.clear()
        self.conversation.add(content, "".join(answer), "".join(thought), is_stopped=is_stopped)

    def _pieces(self, content: Any) -> Iterator[tuple[str, str]]:
        body = {
            "model": self.model,
            "messages": self.conversation.with_question(content),
            "stream": True,
            **self.fields,
        }
        for delta in deltas(self.server, body):
            for kind in ("reasoning_content", "content"):
                if piece := delta.get(kind):
                    yield kind, piece
