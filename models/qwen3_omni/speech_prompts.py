"""The prompt of the talker: the user's turns of the thinker's prompt, and room for the begin of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from models.checkpoints.files import CheckpointError, read_json
from models.qwen3_omni.graph import VOICES
from models.qwen3_omni.prepared import SPOKEN_TOKENS, TURN_TOKENS, Speech
from models.sequence_request import PrepareRequest, PromptPart
from models.voices import known_voice
from shared.errors import ClientError


class _Talker(msgspec.Struct, frozen=True):
    speaker_id: dict[str, int]
    codec_eos_token_id: int


class _Config(msgspec.Struct, frozen=True):
    """The part of `config.json` that is read here."""

    im_start_token_id: int = 151_644
    user_token_id: int = 872
    assistant_token_id: int = 77_091
    tts_pad_token_id: int = 151_671
    enable_audio_output: bool = True
    talker_config: _Talker | None = None


@dataclass(frozen=True, slots=True)
class SpeechPrompts:
    """Makes the talker's prompts of one checkpoint."""

    config: _Config

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read `config.json`.

        Raises:
            CheckpointError: it is missing, or says nothing of speakers.
        """
        path = checkpoint / "config.json"
        try:
            return cls(msgspec.convert(read_json(path), _Config))
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path} is not Qwen3-Omni's: {error}") from error

    def check(self, prepare: PrepareRequest) -> None:
        """Check a request for speech, before anything is computed.

        Raises:
            ClientError: the checkpoint does not speak, the voice is unknown, or a parameter cannot be used.
        """
        outputs, params = prepare.inputs.output_modalities, prepare.params
        if set(outputs) - {"text", "audio"}:
            raise ClientError(
                f"expected text, audio or both, found output_modalities {outputs}",
                code="unsupported_modality",
            )
        if self.config.talker_config is None or not self.config.enable_audio_output:
            raise ClientError("this checkpoint thinks and does not speak: ask for text", code="not_supported")
        if params.warm or params.echo:
            raise ClientError(
                "a spoken answer consists of new tokens: leave out warm and echo", code="not_supported"
            )
        self._speaker(params.voice)

    def of(
        self, ids: Sequence[int], parts: Sequence[PromptPart], *, voice: str | None
    ) -> tuple[Speech, list[int]]:
        """Facts about the talker's prompt, and its token ids.

        Args:
            ids: the thinker's prompt.
            parts: the media in it.
            voice: the name of the voice; None is the default.

        Raises:
            ClientError: the prompt does not end with the begin of the assistant's turn.
        """
        assert self.config.talker_config is not None, "checked before"
        of = self.config
        if list(ids[-TURN_TOKENS:-1]) != [of.im_start_token_id, of.assistant_token_id]:
            raise ClientError(
                "speech needs a chat whose prompt ends with the begin of the assistant's turn; send messages "
                "or a text, and no token ids",
                code="not_supported",
            )
        spans = list(self._user_spans(ids))
        heard = [one for start, end in spans for one in ids[start:end]]
        speech = Speech(
            speaker=self._speaker(voice),
            end_code=self.config.talker_config.codec_eos_token_id,
            spans=spans,
            prompt_tokens=len(heard) + SPOKEN_TOKENS,
            parts=_moved(parts, spans),
        )
        return speech, [*heard, *[of.tts_pad_token_id] * SPOKEN_TOKENS]

    def _user_spans(self, ids: Sequence[int]) -> Any:
        """The turns of the user, as half-open ranges of tokens."""
        starts = [place for place, one in enumerate(ids) if one == self.config.im_start_token_id]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            if ids[start + 1] == self.config.user_token_id:
                yield start, end

    def _speaker(self, voice: str | None) -> int:
        """The code of a voice. Names differ in case between files and servers."""
        assert self.config.talker_config is not None, "checked before"
        speakers = {name.casefold(): code for name, code in self.config.talker_config.speaker_id.items()}
        name = known_voice(voice if voice is not None else self._default(), speakers)
        if name is None:
            known = ", ".join(name.capitalize() for name in speakers)
            raise ClientError(f"voice: expected one of {known}; found {voice!r}", code="invalid_value")
        return speakers[name]

    def _default(self) -> str:
        assert self.config.talker_config is not None, "checked before"
        speakers = self.config.talker_config.speaker_id
        return VOICES[0] if known_voice(VOICES[0], speakers) else next(iter(speakers), "")


def _moved(parts: Sequence[PromptPart], spans: Sequence[tuple[int, int]]) -> list[PromptPart]:
    """The parts within the spans, at their places in the spans' tokens, without rows of their own."""
    found, before = list[PromptPart](), 0
    for start, end in spans:
        found += [
            msgspec.structs.replace(part, start=part.start - start + before, digest="")
            for part in parts
            if start <= part.start < end
        ]
        before += end - start
    return found
