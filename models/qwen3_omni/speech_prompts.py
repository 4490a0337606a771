"""The prompt of Qwen3-Omni's talker: the user's turns of the thinker's prompt, and the begin of an answer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from models.checkpoints.files import CheckpointError, read_json
from models.omni.prepared import TURN_TOKENS, Speech
from models.omni.speech_prompts import TalkerPrompts, moved
from models.qwen3_omni.graph import GRAPH
from models.sequence_request import PromptPart
from shared.errors import ClientError

SPOKEN_TOKENS: Final = TURN_TOKENS + 6
"""The tokens of the talker's prompt after the user's turns; the last has the first token of the answer."""


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


class SpeechPrompts(TalkerPrompts):
    """Makes the talker's prompts of one checkpoint."""

    def __init__(self, config: _Config) -> None:
        talker = config.talker_config if config.enable_audio_output else None
        speakers = talker.speaker_id if talker is not None else {}
        super().__init__({name.casefold(): code for name, code in speakers.items()}, default=GRAPH.voices[0])
        self._config: Final = config

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

    def of(
        self, ids: Sequence[int], parts: Sequence[PromptPart], *, voice: str | None
    ) -> tuple[Speech, list[int]]:
        of = self._config
        assert of.talker_config is not None, "checked before"
        if list(ids[-TURN_TOKENS:-1]) != [of.im_start_token_id, of.assistant_token_id]:
            raise ClientError(
                "speech needs a chat whose prompt ends with the begin of the assistant's turn; send messages "
                "or a text, and no token ids",
                code="not_supported",
            )
        spans = list(self._user_spans(ids))
        heard = [one for start, end in spans for one in ids[start:end]]
        name, speaker = self.speaker(voice)
        speech = Speech(
            voice=name,
            speaker=speaker,
            end_codes=[of.talker_config.codec_eos_token_id],
            spans=spans,
            prompt_tokens=len(heard) + SPOKEN_TOKENS,
            parts=moved(parts, spans),
        )
        return speech, [*heard, *[of.tts_pad_token_id] * SPOKEN_TOKENS]

    def _user_spans(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The turns of the user, as half-open ranges of tokens."""
        starts = [place for place, one in enumerate(ids) if one == self._config.im_start_token_id]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            if ids[start + 1] == self._config.user_token_id:
                yield start, end
