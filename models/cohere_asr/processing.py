"""The CPU nodes of Cohere Transcribe: windows of mel features, cut as transformers cuts them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from models.base import MediaReader
from models.checkpoints.files import CheckpointError
from models.cohere_asr.graph import CohereOptions
from models.cohere_asr.settings import FRAME, LANGUAGES, CohereSettings
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.mel import RATE
from models.speech_to_text.pauses import STEP
from models.speech_to_text.window_processing import Listening, WindowProcessing
from models.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "CohereProcessing":
    """Read the settings and the tokenizer of a checkpoint; `max_seq_len` limits texts.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    from transformers import CohereAsrFeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    extractor = read_extractor(CohereAsrFeatureExtractor, checkpoint)
    found = extractor.sampling_rate, extractor.min_energy_window_samples
    if found != (RATE, STEP):
        raise CheckpointError(
            f"{checkpoint}: expected sound of {RATE} samples per second, cut at multiples of {STEP} samples "
            f"(min_energy_window_samples); found {found[0]} and {found[1]} in the settings of its features"
        )
    return CohereProcessing(checkpoint, extractor, max_seq_len, media)


class CohereProcessing(WindowProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        checkpoint: the folder.
        extractor: transformers' `CohereAsrFeatureExtractor`.
        max_seq_len: the most cells of a sequence.
        media: reads the file.
    """

    def __init__(self, checkpoint: Path, extractor: Any, max_seq_len: int, media: MediaReader) -> None:
        self._settings: Final = CohereSettings.read(checkpoint)
        self._extractor, self._max_seq_len = extractor, max_seq_len
        tokenizer, _ = load_tokenizer(checkpoint)
        super().__init__(tokenizer, {self._settings.end}, CohereOptions, media)

    def listening(self, options: CohereOptions) -> Listening:
        code = self._settings.code_of(options.language)
        return Listening(
            longest=round(self._extractor.max_audio_clip_s * RATE),
            search=round(self._extractor.overlap_chunk_second * RATE),
            before=self._settings.before(code, is_punctuated=options.punctuation),
        )

    def most_tokens(self, options: CohereOptions, samples: int) -> int:
        before = self._settings.before(
            self._settings.code_of(options.language), is_punctuated=options.punctuation
        )
        room = min(self._settings.positions, self._max_seq_len - samples // FRAME - 1)
        return max(min(len(before) + options.max_window_tokens, room), len(before) + 1)

    def heard(self, sound: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        features = self._extractor(sound, sampling_rate=RATE, return_tensors="np").input_features[0]
        return np.asarray(features, np.float32)

    def language(self, options: CohereOptions) -> tuple[str, str]:
        code = self._settings.code_of(options.language)
        return code, LANGUAGES[code]
