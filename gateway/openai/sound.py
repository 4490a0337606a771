"""Sound in the answers of chats, as OpenAI's API has it.

    {"role": "assistant", "content": null, "audio": {"id": "audio-chatcmpl-1", "data": <base64>,
     "expires_at": 1795172009, "transcript": "Good morning."}}

A stream has it in deltas: `{"audio": {"id": ..., "transcript": "Good"}}` for text as it is written, and
`{"audio": {"id": ..., "data": <base64>}}` for sound as it is made. The id names the request, whose output on
the log is the only store of the answer (`gateway.openai.earlier_sound`).
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from gateway.errors import InvalidParamError
from gateway.served_model import ServedModel
from gateway.sound.encoder import FORMATS, Encoder, PcmFormat
from gateway.sound.voices import voice_named
from shared.events import OutputChunk

AUDIO: Final = "audio"
STREAMED: Final = "pcm16"
ID_PREFIX: Final = "audio-"
_KINDS: Final = {STREAMED: "pcm"}
"""Formats whose names are others than those of `/v1/audio/speech`."""


class SoundFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The field `audio` of a chat.

    Attributes:
        format: of the sound; of a stream `pcm16`.
        voice: its name, or an object with its `id`; None is the model's usual one.
    """

    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]
    voice: str | dict[str, Any] | None = None


def check_sound(
    sound: SoundFields | None,
    outputs: Sequence[str],
    *,
    is_stream: bool,
    has_tools: bool,
    served: ServedModel,
) -> str | None:
    """Check the field `audio` of a chat that asks for `outputs`; return the voice's name.

    Raises:
        InvalidParamError: it is missing, or asks for what cannot be done.
    """
    if AUDIO not in outputs:
        if sound is not None:
            raise InvalidParamError(
                "audio", f"audio: expected 'audio' in modalities with it, found {outputs}"
            )
        return None
    if has_tools:
        raise InvalidParamError(
            "tools", "tools: expected none with 'audio' in modalities; found some", code="not_supported"
        )
    if sound is None:
        raise InvalidParamError(
            "audio",
            "audio: expected a format and a voice, because modalities has 'audio'; found nothing",
            code="missing_required_parameter",
        )
    if is_stream and sound.format != STREAMED:
        raise InvalidParamError(
            "audio.format", f"audio.format: expected {STREAMED!r} in a stream, found {sound.format!r}"
        )
    return voice_named("audio.voice", sound.voice, served)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSound:
    """The sound of one answer to a chat.

    Attributes:
        kind: the format, a key of `FORMATS`.
        pcm_format: the model's sample format.
        ids: the ids of the choices' sound.
        expires_s: the time at which the answer leaves the log, in seconds since 1970.
    """

    kind: str
    pcm_format: PcmFormat
    ids: Sequence[str]
    expires_s: int

    def reader(self, choice: int) -> "SoundReader":
        """The reader of a choice's sound."""
        kind = FORMATS[self.kind]
        return SoundReader(self.ids[choice], self.expires_s, (kind.whole or kind.stream)(self.pcm_format))


@dataclass(slots=True)
class SoundReader:
    """Reads the sound of one choice out of its chunks."""

    audio_id: str
    expires_s: int
    encoder: Encoder
    _data: list[bytes] = field(default_factory=list)

    def delta(self, chunk: OutputChunk) -> dict[str, Any] | None:
        """The delta for a chunk; None if it adds nothing."""
        if chunk.modality == AUDIO:
            data = self.encoder.push(chunk.data or b"")
            return {AUDIO: {"id": self.audio_id, "data": b64encode(data).decode()}} if data else None
        return {AUDIO: {"id": self.audio_id, "transcript": chunk.text}} if chunk.text else None

    def last_delta(self) -> dict[str, Any]:
        """The delta at the end of the choice."""
        return {AUDIO: {"id": self.audio_id, "expires_at": self.expires_s}}

    def push(self, chunk: OutputChunk) -> None:
        """Add a chunk."""
        if chunk.modality == AUDIO:
            self._data.append(self.encoder.push(chunk.data or b""))

    def whole(self, transcript: str) -> dict[str, Any]:
        """The field `audio` of the message, once all chunks were added."""
        data = b"".join([*self._data, self.encoder.finish()])
        return {
            "id": self.audio_id,
            "data": b64encode(data).decode(),
            "expires_at": self.expires_s,
            "transcript": transcript,
        }


def kind_of(sound: SoundFields) -> str:
    """The format's key in `FORMATS`."""
    return _KINDS.get(sound.format, sound.format)
