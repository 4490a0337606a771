"""The published folder of Qwen3-TTS: what is read of its `config.json`, and the codec's folder. No torch."""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from models.checkpoints.files import CheckpointError, UnsupportedArchitectureError, read_json

CODEC_FOLDER: Final = "speech_tokenizer"
TOKENIZER: Final = "qwen3_tts_tokenizer_12hz"
PRESET: Final = "custom_voice"


class TalkerCodes(msgspec.Struct, frozen=True, kw_only=True):
    """The codes with a meaning, from `talker_config`.

    Attributes:
        spk_id: by name of a voice, in lower case, its code.
        spk_is_dialect: by name of a voice, the name of the dialect that it speaks, or false.
        codec_language_id: by name of a language, in lower case, its code.
    """

    text_vocab_size: int
    codec_eos_token_id: int
    codec_pad_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    spk_id: Annotated[dict[str, int], msgspec.Meta(min_length=1)]
    spk_is_dialect: dict[str, str | bool] = {}
    codec_language_id: dict[str, int] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `config.json` that `prepare` reads."""

    talker_config: TalkerCodes
    tts_pad_token_id: int = 151_671
    tts_bos_token_id: int = 151_672
    tts_eos_token_id: int = 151_673
    tts_model_size: str = ""


def read_settings(folder: Path) -> Settings:
    """Read `config.json`.

    Raises:
        CheckpointError: it is missing or malformed.
        UnsupportedArchitectureError: the model clones or designs voices, or has another codec.
    """
    path = folder / "config.json"
    raw = read_json(path)
    kind, codec = raw.get("tts_model_type"), raw.get("tokenizer_type")
    if kind != PRESET:
        raise UnsupportedArchitectureError(
            f"{path}: expected tts_model_type {PRESET!r}, found {kind!r}: models that clone or design voices "
            "are not served; use one of Qwen3-TTS's CustomVoice checkpoints"
        )
    if codec != TOKENIZER:
        raise UnsupportedArchitectureError(f"{path}: expected tokenizer_type {TOKENIZER!r}, found {codec!r}")
    try:
        return msgspec.convert(raw, Settings)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is not Qwen3-TTS's: {error}") from error
