"""The prompt of Qwen2.5-Omni's talker: the thinker's, then the token of the voice and the answer's first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from models.checkpoints.files import CheckpointError, read_json
from models.omni.prepared import Speech
from models.omni.speech_prompts import TalkerPrompts, moved
from models.qwen2_5_omni.graph import GRAPH
from models.sequence_request import PromptPart

SPOKEN_TOKENS: Final = 2
"""The tokens of the talker's prompt after the thinker's."""


class _Talker(msgspec.Struct, frozen=True):
    tts_text_pad_token_id: int = 151_859
    tts_codec_pad_token_id: int = 8292
    tts_codec_start_token_id: int = 8293
    tts_codec_end_token_id: int = 8294
    tts_codec_mask_token_id: int = 8296


class _Config(msgspec.Struct, frozen=True):
    """The part of `config.json` that is read here."""

    enable_audio_output: bool = True
    talker_config: _Talker = _Talker()


class SpeechPrompts(TalkerPrompts):
    """Makes the talker's prompts of one checkpoint.

    Args:
        speakers: the token of each voice, by its name; empty: the checkpoint does not speak.
    """

    def __init__(self, talker: _Talker, speakers: Mapping[str, int]) -> None:
        super().__init__(speakers, default=GRAPH.voices[0])
        self._talker: Final = talker

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read `config.json`, and the tokens of the voices.

        Raises:
            CheckpointError: a file is missing or malformed.
        """
        from models.qwen2_5_omni.voices import read_voices  # noqa: PLC0415 - heavy: it imports torch

        path = checkpoint / "config.json"
        try:
            config = msgspec.convert(read_json(path), _Config)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path} is not Qwen2.5-Omni's: {error}") from error
        voices = read_voices(checkpoint) if config.enable_audio_output else {}
        return cls(config.talker_config, {name: voice.token for name, voice in voices.items()})

    def of(
        self, ids: Sequence[int], parts: Sequence[PromptPart], *, voice: str | None
    ) -> tuple[Speech, list[int]]:
        of, spans = self._talker, [(0, len(ids))]
        name, token = self.speaker(voice)
        speech = Speech(
            voice=name,
            speaker=token,
            end_codes=[of.tts_codec_pad_token_id, of.tts_codec_end_token_id],
            spans=spans,
            prompt_tokens=len(ids) + SPOKEN_TOKENS,
            parts=moved(parts, spans),
            # As in transformers, whose prompt of the talker consists of these.
            penalized_ids=[
                of.tts_codec_mask_token_id,
                of.tts_codec_pad_token_id,
                of.tts_codec_start_token_id,
            ],
        )
        return speech, [*ids, *[of.tts_text_pad_token_id] * SPOKEN_TOKENS]
