"""The voices of a checkpoint, in its file `spk_dict.pt`: only tensors are read, and no code is run."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.checkpoints.files import CheckpointError
from models.qwen2_5_omni.weight_files import VOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """One voice.

    Attributes:
        token: the thinker's token before a text that it speaks.
        embedding: (1, width), float32.
        spectrogram: of speech of it, (1, frames, mels), float32.
    """

    token: int
    embedding: torch.Tensor
    spectrogram: torch.Tensor


def read_voices(checkpoint: Path) -> Mapping[str, Voice]:
    """The voices by their names, in the order of the file.

    Raises:
        CheckpointError: the file is missing or damaged, or has something else.
    """
    path = checkpoint / VOICES
    expected = f"{path}: expected the voices that were published with the weights"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        voices = {str(name): _voice(one) for name, one in found.items()}
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{expected}, found none: {' '.join(str(error).split()):.300}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{expected}, found something else: {error}") from error
    if not voices:
        raise CheckpointError(f"{expected}, found an empty file")
    return voices


def _voice(found: Mapping[str, Any]) -> Voice:
    embedding, spectrogram = found["cond"].float(), found["ref_mel"].float()
    if embedding.ndim != 2 or spectrogram.ndim != 3:
        shapes = f"cond {list(embedding.shape)} and ref_mel {list(spectrogram.shape)}"
        raise ValueError(f"expected (1, width) and (1, frames, mels), {shapes}")
    return Voice(token=int(found["bos_token"]), embedding=embedding, spectrogram=spectrogram)
