"""The CPU nodes of Voxtral: the published request for a transcription, and features of whole chunks."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from models.base import MediaReader
from models.checkpoints.files import CheckpointError
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.hearing_processing import HearingProcessing
from models.speech_to_text.language_names import language_names
from models.speech_to_text.mel import RATE
from models.text.tokenizer import load_tokenizer
from models.voxtral.graph import VoxtralOptions
from models.voxtral.settings import Prompt, VoxtralSettings, code_of

if TYPE_CHECKING:
    import numpy.typing as npt


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "VoxtralProcessing":
    """Read the settings and the tokenizer of a checkpoint.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    from transformers import WhisperFeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    extractor = read_extractor(WhisperFeatureExtractor, checkpoint)
    if extractor.sampling_rate != RATE:
        raise CheckpointError(
            f"{checkpoint}: expected sound of {RATE} samples per second, found {extractor.sampling_rate} in "
            "the settings of its features"
        )
    return VoxtralProcessing(checkpoint, extractor, max_seq_len, media)


class VoxtralProcessing(HearingProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        checkpoint: the folder.
        extractor: transformers' `WhisperFeatureExtractor`.
        max_seq_len: the most tokens of a sequence.
        media: reads the file.
    """

    def __init__(self, checkpoint: Path, extractor: Any, max_seq_len: int, media: MediaReader) -> None:
        self._settings: Final = VoxtralSettings.read(checkpoint)
        self._extractor = extractor
        tokenizer, _ = load_tokenizer(checkpoint)
        super().__init__(tokenizer, self._settings.ends, VoxtralOptions, max_seq_len, media)
        self._prompt: Final = Prompt.read(tokenizer, checkpoint)

    def rows(self, samples: int) -> int:
        return self._settings.rows(samples)

    def prompt(self, options: VoxtralOptions) -> list[int]:
        return self._prompt.ids(self._settings.place, code_of(options.language))

    def heard(self, sound: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        # The features of the window as one, in which silence completes the last chunk.
        found = self._extractor(
            sound,
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self._settings.chunk,
            return_tensors="np",
        )
        return np.asarray(found.input_features[0], np.float32)

    def language(self, options: VoxtralOptions) -> tuple[str, str]:
        code = code_of(options.language)
        return ("", "") if code is None else (code, language_names()[code])
