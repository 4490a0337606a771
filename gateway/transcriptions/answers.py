"""The answers of the transcription routes: a document, captions, plain text, or server-sent events.

    data: {"type": "transcript.text.delta", "delta": " Good morning."}
    data: {"type": "transcript.text.done", "text": "Good morning.", "usage": {"type": "duration", ...}}

A model gives two modalities (ADR 56): `text`, whose chunks together are the transcript, and `transcript`,
JSON with the segments, times and language of each window of the file.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from gateway.errors import HttpError
from gateway.http.lines import server_sent_event
from gateway.requests.response import DocumentFormat
from gateway.requests.resume import StreamPosition
from gateway.transcriptions import captions
from gateway.transcriptions.request import TEXT, TRANSCRIPT
from shared.events import OutputChunk, Usage
from shared.output_pieces import PieceAssembler

Form = Literal["json", "text", "srt", "verbose_json", "vtt"]
MEDIA_TYPES: Final[dict[Form, str]] = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
_SEGMENT: Final = (
    "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio",
    "no_speech_prob",
)  # fmt: skip
"""The fields of OpenAI's `TranscriptionSegment`."""


@dataclass(slots=True)
class Heard:
    """All that was heard so far.

    Attributes:
        texts: the transcript, in pieces.
        segments: with `words`, if they were asked for.
        language: the name of the language, or its code; empty if nothing was said of it.
        duration: of the file, in seconds.
    """

    texts: list[str] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    language: str = ""
    duration: float = 0.0
    _pieces: PieceAssembler[bytes] = field(default_factory=PieceAssembler)

    @property
    def text(self) -> str:
        return "".join(self.texts).strip()

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of models that are billed by duration."""
        return {"type": "duration", "seconds": self.duration}

    def push(self, chunk: OutputChunk) -> None:
        """Take a chunk of the answer."""
        if chunk.modality == TEXT:
            self.texts.append(chunk.text or "")
        elif chunk.modality == TRANSCRIPT:
            pieces = self._pieces.push(chunk.metadata, chunk.data or b"")
            if pieces is not None:
                self._take(msgspec.json.decode(b"".join(pieces)))

    def _take(self, window: dict[str, Any]) -> None:
        self.segments += window["segments"]
        self.duration = window["duration"]
        self.language = self.language or window.get("language_name") or window.get("language") or ""


@dataclass(slots=True)
class TranscriptFile(DocumentFormat):
    """The whole transcript, when it is complete.

    Attributes:
        form: of the file.
        task: `transcribe` or `translate`.
        with_segments, with_words: what `verbose_json` lists.
    """

    form: Form
    task: str
    with_segments: bool = True
    with_words: bool = False
    media_type: str = field(init=False)
    _heard: Heard = field(default_factory=Heard)

    def __post_init__(self) -> None:
        self.media_type = MEDIA_TYPES[self.form]

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self._heard.push(chunk)
        return b""

    def complete(self, usage: Usage) -> bytes:
        heard = self._heard
        match self.form:
            case "json":
                return msgspec.json.encode({"text": heard.text, "usage": heard.usage})
            case "verbose_json":
                return msgspec.json.encode(self._verbose())
            case "text":
                return f"{heard.text}\n".encode()
            case "srt":
                return captions.srt(heard.segments).encode()
            case "vtt":
                return captions.vtt(heard.segments).encode()

    def _verbose(self) -> dict[str, Any]:
        heard = self._heard
        found: dict[str, Any] = {
            "task": self.task,
            "language": heard.language,
            "duration": heard.duration,
            "text": heard.text,
        }
        if self.with_words:
            words = (word for one in heard.segments for word in one.get("words", ()))
            found["words"] = [
                {"word": one["word"].strip(), "start": one["start"], "end": one["end"]} for one in words
            ]
        if self.with_segments:
            found["segments"] = [{name: one[name] for name in _SEGMENT} for one in heard.segments]
        return {**found, "usage": heard.usage}


class TranscriptEvents:
    """The transcript as server-sent events, in the order of the file."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, position: StreamPosition) -> None:
        self._position = position
        self._heard = Heard()

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        self._heard.push(chunk)
        if chunk.modality != TEXT or not chunk.text or self._position.has(choice, chunk.index):
            return b""
        self._position.advance(choice, chunk.index)
        return server_sent_event({"type": "transcript.text.delta", "delta": chunk.text}, self._position)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        if self._position.is_complete:
            return b""
        self._position.end(0)
        self._position.complete()
        done = {"type": "transcript.text.done", "text": self._heard.text, "usage": self._heard.usage}
        return server_sent_event(done, self._position)

    def failed(self, error: HttpError) -> bytes:
        return server_sent_event(error.body)
