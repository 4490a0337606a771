"""The settings of a Higgs Audio v2 checkpoint: sizes, special tokens and codes. No torch."""

from pathlib import Path
from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta

from models.checkpoints.files import CheckpointError, read_json, read_json_if_present

_T = TypeVar("_T")
_Id = Annotated[int, Meta(ge=0)]
_Size = Annotated[int, Meta(ge=1)]


class HiggsAudioSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` says; where it says nothing, transformers' defaults.

    Attributes:
        num_codebooks: the codes of a frame; each is a step later than the one before it.
        codebook_size: the codes to choose from, with those that begin and end speech.
        audio_bos_token_id: the last token of a prompt.
        audio_token_id, audio_delay_token_id: the tokens of steps with sound, before and after its end began.
        audio_stream_bos_id, audio_stream_eos_id: the codes before speech, and behind its end.
    """

    vocab_size: _Size = 128_256
    num_hidden_layers: _Size = 28
    num_key_value_heads: _Size = 8
    head_dim: _Size = 128
    max_position_embeddings: _Size = 2048
    num_codebooks: _Size = 8
    codebook_size: _Size = 1024
    audio_bos_token_id: _Id = 128_013
    audio_token_id: _Id = 128_016
    audio_delay_token_id: _Id = 128_014
    audio_stream_bos_id: _Id = 1024
    audio_stream_eos_id: _Id = 1025
    dtype: str = "None"

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: the file is missing or malformed, or a special code is not among the codes.
        """
        path = checkpoint / "config.json"
        found = _read(path, read_json(path), cls)
        if max(found.audio_stream_bos_id, found.audio_stream_eos_id) >= found.codebook_size:
            raise CheckpointError(
                f"{path}: expected audio_stream_bos_id and audio_stream_eos_id below the codebook_size of "
                f"{found.codebook_size}, found {found.audio_stream_bos_id} and {found.audio_stream_eos_id}"
            )
        return found


class Repeats(msgspec.Struct, frozen=True, kw_only=True):
    """Drawing codes again that repeat too often, by `generation_config.json`.

    Attributes:
        ras_win_len: the last steps that are looked at; None: nothing is drawn again.
        ras_win_max_num_repeat: a code is drawn again, without temperature and filters, if its codebook has it
            so often in these steps.
    """

    ras_win_len: _Size | None = None
    ras_win_max_num_repeat: _Size | None = None

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Read the settings of a folder.

        Raises:
            CheckpointError: the file is malformed.
        """
        path = checkpoint / "generation_config.json"
        return _read(path, read_json_if_present(path), cls)


def _read(path: Path, raw: object, what: type[_T]) -> _T:
    try:
        return msgspec.convert(raw, what)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
