"""The torch nodes of Qwen3-ASR: transformers' encoder with its projector, and Qwen3 over the KV pool.

encoder   features (bands, frames) -> states (rows, hidden)
decoder   states -> the tokens of a window
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import pad

from models.checkpoints.progress import Progress, silent
from models.qwen3_asr.settings import Qwen3AsrSettings
from models.speech_to_text.hearing_lm import HearingDecoder, SoundEncoder, load_hearing
from models.vision_language.decoder import examine_decoder


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
    settings = Qwen3AsrSettings.read(checkpoint)
    return load_hearing(
        checkpoint,
        node,
        Qwen3AsrEncoder,
        family="qwen3_asr",
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
    Qwen3AsrSettings.read(checkpoint)
    return examine_decoder(checkpoint, members=members)


class Qwen3AsrEncoder(SoundEncoder):
    """The encoder. A frame attends to those of its own span of the file, 8 s as published."""

    def encode(self, heard: torch.Tensor) -> torch.Tensor:
        # Spans do not see each other, so they are computed one by one, in bounded memory.
        span = int(self.model.config.audio_config.n_window_infer)
        return torch.cat([self._encode(part) for part in torch.split(heard, span, dim=1)])

    def _encode(self, features: torch.Tensor) -> torch.Tensor:
        chunk, frames = 2 * int(self.model.config.audio_config.n_window), features.shape[1]
        padding = -frames % chunk
        mask = torch.arange(frames + padding, device=features.device)[None] < frames
        found = self.model.model.get_audio_features(pad(features, (0, padding))[None], mask.long())
        rows: torch.Tensor = found.pooler_output
        return rows
