"""The torch nodes of Voxtral: transformers' encoder with its projector, and its Llama over the KV pool.

encoder   features (bands, frames) of whole chunks -> states (rows, hidden)
decoder   states -> the tokens of a window
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from models.checkpoints.progress import Progress, silent
from models.speech_to_text.hearing_lm import HearingDecoder, SoundEncoder, load_hearing
from models.vision_language.decoder import examine_decoder
from models.voxtral.settings import VoxtralSettings


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> HearingDecoder | SoundEncoder:
    """Load `encoder` or `decoder` of a checkpoint folder in Hugging Face format; `kwargs` are not used.

    Raises:
        CheckpointError: a file of the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the language model cannot be served over a paged pool.
    """
    settings = VoxtralSettings.read(checkpoint)
    return load_hearing(
        checkpoint,
        node,
        VoxtralEncoder,
        family="voxtral",
        place=settings.place,
        ends=settings.ends,
        device=device,
        dtype=dtype,
        progress=progress,
    )


def examine(checkpoint: Path, node: str, *, members: int = 1) -> int:
    """Raise what `load` would raise before it reads a weight; return the longest sequence.

    Raises:
        CheckpointError, UnsupportedArchitectureError: as `load` does.
    """
    VoxtralSettings.read(checkpoint)
    return examine_decoder(checkpoint, members=members)


class VoxtralEncoder(SoundEncoder):
    """The encoder. Chunks do not see each other, so they are computed one by one, in bounded memory."""

    def encode(self, heard: torch.Tensor) -> torch.Tensor:
        frames = 2 * int(self.model.config.audio_config.max_source_positions)
        found = [
            self.model.model.get_audio_features(chunk[None]).pooler_output
            for chunk in torch.split(heard, frames, dim=1)
        ]
        return torch.cat(found)
