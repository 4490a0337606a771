"""A spoken answer as a client gets it: a file's bytes, or server-sent events that hold them.

    data: {"type": "speech.audio.delta", "audio": <base64>}
    data: {"type": "speech.audio.done", "usage": {"input_tokens": 7, "output_tokens": 84, "total_tokens": 91}}

Bytes cannot say that something failed: where an answer ends before its time, the connection does, too, so
that nobody takes half of it for all.

Either may be taken up again (`gateway.requests.resume`): the file is made again from its beginning, of the
same chunks and so of the same bytes, and what its client has of it is left out.
"""

from base64 import b64encode
from typing import Final

import msgspec

from gateway.errors import HttpError
from gateway.requests.resume import Position
from gateway.speech.encoder import FORMATS, Encoder, Sound
from shared.events import OutputChunk, Usage

EVENTS: Final = "text/event-stream"


class SpeechBytes:
    """An answer as one file.

    Args:
        kind: of file, of `FORMATS`.
        is_stream: whether its bytes are sent as they come, and its head says no length.
        silence: what the model's sound is, for an answer without any.
        had_bytes: how many of the first bytes the client has.
    """

    def __init__(self, kind: str, *, is_stream: bool, silence: Sound, had_bytes: int = 0) -> None:
        self.media_type = FORMATS[kind].media_type
        self._kind = FORMATS[kind]
        self._is_stream = is_stream
        self._silence = silence
        self._had_bytes = had_bytes
        self._encoder: Encoder | None = None
        self._whole: list[bytes] = []

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality != "audio" or not chunk.data:
            return b""
        return self._told(self._of(Sound.of(chunk.metadata)).push(chunk.data))

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        rest = self._of(self._silence).finish()
        return self._new(b"".join([*self._whole, rest]))

    def failed(self, error: HttpError) -> None:
        return None

    def _of(self, sound: Sound) -> Encoder:
        if self._encoder is None:
            whole = None if self._is_stream else self._kind.whole
            self._encoder = (whole or self._kind.stream)(sound)
        return self._encoder

    def _told(self, data: bytes) -> bytes:
        """What is sent now of what the file has so far."""
        if self._is_stream:
            return self._new(data)
        self._whole.append(data)
        return b""

    def _new(self, data: bytes) -> bytes:
        """What of it the client has not."""
        had = min(self._had_bytes, len(data))
        self._had_bytes -= had
        return data[had:]


class SpeechEvents:
    """An answer as server-sent events, each with a piece of the file, and with the stream's position."""

    media_type = EVENTS

    def __init__(self, kind: str, *, silence: Sound, position: Position | None = None) -> None:
        self._bytes = SpeechBytes(kind, is_stream=True, silence=silence)
        self._position = position or Position.start(1)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        data = self._bytes.chunk(choice, chunk)
        if self._position.has(choice, chunk.index):
            return b""
        self._position.advance(choice, chunk.index)
        return self._delta(data)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        rest, told = self._bytes.complete(usage), b""
        if not self._position.has_ended(0):
            self._position.end(0)
            told = self._delta(rest)
        if self._position.is_complete:
            return told
        self._position.complete()
        done = {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
            },
        }
        return told + _event(done, self._position)

    def failed(self, error: HttpError) -> bytes:
        return _event(error.body)

    def _delta(self, data: bytes) -> bytes:
        if not data:
            return b""
        return _event({"type": "speech.audio.delta", "audio": b64encode(data).decode()}, self._position)


def _event(told: object, position: Position | None = None) -> bytes:
    head = b"" if position is None else b"id: %s\n" % str(position).encode()
    return head + b"data: " + msgspec.json.encode(told) + b"\n\n"
