"""The answers of `/v1/audio/speech`: an audio file, or server-sent events with its bytes.

    data: {"type": "speech.audio.delta", "audio": <base64>}
    data: {"type": "speech.audio.done", "usage": {"input_tokens": 7, "output_tokens": 84, "total_tokens": 91}}

A file cannot say that the answer failed midway. So the connection is closed instead, and no client takes a
part for the whole.

Both can be resumed (`gateway.requests.resume`): the file is encoded again from its beginning, from the same
chunks and so with the same bytes, and the bytes that the client has are left out.
"""

from base64 import b64encode
from typing import Final

from gateway.errors import HttpError
from gateway.http.lines import server_sent_event
from gateway.requests.resume import StreamPosition
from gateway.sound.encoder import FORMATS, Encoder, PcmFormat
from shared.events import OutputChunk, Usage

EVENTS: Final = "text/event-stream"


class SpeechFile:
    """An answer as one file.

    Args:
        kind: the format, a key of `FORMATS`.
        is_stream: send bytes as they are encoded, with a header without a length.
        pcm_format: the model's sample format, for an answer without audio.
        had_bytes: the number of leading bytes that the client has.
    """

    def __init__(self, kind: str, *, is_stream: bool, pcm_format: PcmFormat, had_bytes: int = 0) -> None:
        self.media_type = FORMATS[kind].media_type
        self._kind = FORMATS[kind]
        self._is_stream = is_stream
        self._pcm_format = pcm_format
        self._had_bytes = had_bytes
        self._encoder: Encoder | None = None
        self._whole: list[bytes] = []

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality != "audio" or not chunk.data:
            return b""
        return self._sent(self._encoder_for(PcmFormat.of(chunk.metadata)).push(chunk.data))

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        rest = self._encoder_for(self._pcm_format).finish()
        return self._new(b"".join([*self._whole, rest]))

    def failed(self, error: HttpError) -> None:
        return None

    def _encoder_for(self, pcm_format: PcmFormat) -> Encoder:
        if self._encoder is None:
            whole = None if self._is_stream else self._kind.whole
            self._encoder = (whole or self._kind.stream)(pcm_format)
        return self._encoder

    def _sent(self, data: bytes) -> bytes:
        """The part of newly encoded bytes that is sent now."""
        if self._is_stream:
            return self._new(data)
        self._whole.append(data)
        return b""

    def _new(self, data: bytes) -> bytes:
        """The part of `data` that the client does not have."""
        had = min(self._had_bytes, len(data))
        self._had_bytes -= had
        return data[had:]


class SpeechEvents:
    """An answer as server-sent events, each with a piece of the file and the stream's position."""

    media_type = EVENTS

    def __init__(self, kind: str, *, pcm_format: PcmFormat, position: StreamPosition | None = None) -> None:
        self._file = SpeechFile(kind, is_stream=True, pcm_format=pcm_format)
        self._position = position or StreamPosition.start(1)

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        data = self._file.chunk(choice, chunk)
        if self._position.has(choice, chunk.index):
            return b""
        self._position.advance(choice, chunk.index)
        return self._delta(data)

    def ended(self, choice: int, finish_reason: str) -> bytes:
        return b""

    def complete(self, usage: Usage) -> bytes:
        rest, data = self._file.complete(usage), b""
        if not self._position.has_ended(0):
            self._position.end(0)
            data = self._delta(rest)
        if self._position.is_complete:
            return data
        self._position.complete()
        done = {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.total_tokens,
            },
        }
        return data + server_sent_event(done, self._position)

    def failed(self, error: HttpError) -> bytes:
        return server_sent_event(error.body)

    def _delta(self, data: bytes) -> bytes:
        if not data:
            return b""
        return server_sent_event(
            {"type": "speech.audio.delta", "audio": b64encode(data).decode()}, self._position
        )
