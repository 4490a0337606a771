"""The CPU nodes of Moonshine: windows of samples, as long as their text fits."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from models.base import MediaReader
from models.checkpoints.files import CheckpointError
from models.moonshine.graph import MoonshineOptions
from models.moonshine.settings import MoonshineSettings, most_tokens
from models.speech_to_text.extractors import read_extractor
from models.speech_to_text.mel import RATE
from models.speech_to_text.window_processing import Listening, WindowProcessing
from models.text.tokenizer import load_tokenizer
from shared.errors import ClientError

if TYPE_CHECKING:
    import numpy.typing as npt

SHORTEST_WINDOW_S: Final = 4
"""Windows of a long file are at least so long."""


def load(checkpoint: Path, *, max_seq_len: int, media: MediaReader) -> "MoonshineProcessing":
    """Read the settings and the tokenizer of a checkpoint. Windows fit `max_seq_len`.

    Raises:
        CheckpointError: a file is missing or malformed.
    """
    from transformers import Wav2Vec2FeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

    extractor = read_extractor(Wav2Vec2FeatureExtractor, checkpoint)
    if extractor.sampling_rate != RATE:
        raise CheckpointError(
            f"{checkpoint}: expected sound of {RATE} samples per second, found {extractor.sampling_rate} in "
            "the settings of its features"
        )
    return MoonshineProcessing(checkpoint, extractor, max_seq_len, media)


class MoonshineProcessing(WindowProcessing):
    """The CPU nodes of one checkpoint.

    Args:
        checkpoint: the folder.
        extractor: transformers' `Wav2Vec2FeatureExtractor`, which normalises samples if it is set to.
        max_seq_len: the most cells of a sequence.
        media: reads the file.
    """

    def __init__(self, checkpoint: Path, extractor: Any, max_seq_len: int, media: MediaReader) -> None:
        self._settings: Final = MoonshineSettings.read(checkpoint)
        self._extractor, self._max_seq_len = extractor, max_seq_len
        tokenizer, _ = load_tokenizer(checkpoint)
        super().__init__(tokenizer, {self._settings.end}, MoonshineOptions, media)

    def listening(self, options: MoonshineOptions) -> Listening:
        longest = self._settings.longest_window(options.tokens_per_second, self._max_seq_len)
        if longest < SHORTEST_WINDOW_S * RATE:
            raise ClientError(
                f"tokens_per_second: {options.tokens_per_second} leaves windows of {longest / RATE:.1f} s "
                f"for texts of {self._settings.positions} tokens and sequences of {self._max_seq_len}; "
                f"expected at least {SHORTEST_WINDOW_S} s: ask for fewer, or raise max_seq_len"
            )
        return Listening(longest=longest, search=longest // 4, before=[self._settings.start])

    def most_tokens(self, options: MoonshineOptions, samples: int) -> int:
        return most_tokens(samples, options.tokens_per_second, self._settings.positions)

    def heard(self, sound: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        values = self._extractor(
            sound,
            sampling_rate=RATE,
            return_tensors="np",
            padding=True,
            pad_to_multiple_of=self._settings.multiple,
        ).input_values[0]
        return np.asarray(values, np.float32)
