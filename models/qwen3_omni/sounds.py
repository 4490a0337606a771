"""Audio as the model hears it: a spectrogram, and the number of rows that the encoder makes of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from models.checkpoints.files import CheckpointError, read_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ROWS_OF_A_WINDOW: Final = 13
_HALVINGS: Final = 3


class Hearing:
    """Transformers' own feature extractor of a checkpoint.

    Attributes:
        rate: samples per second.
    """

    def __init__(self, checkpoint: Path) -> None:
        from transformers import WhisperFeatureExtractor  # noqa: PLC0415 - heavy: it imports torch

        try:
            found = WhisperFeatureExtractor.from_pretrained(str(checkpoint), local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{checkpoint}: expected the settings of a feature extractor in preprocessor_config.json: "
                f"{' '.join(str(error).split()):.300}"
            ) from error
        self._extractor: Final[Any] = found
        self.rate: Final[int] = found.sampling_rate
        self._hop: Final[int] = found.hop_length
        thinker = read_json(checkpoint / "config.json").get("thinker_config") or {}
        self._window: Final[int] = 2 * (thinker.get("audio_config") or {}).get("n_window", 50)

    def rows(self, samples: int) -> int:
        """The rows of so many samples."""
        return rows_of(samples // self._hop, self._window)

    def spectrogram(self, samples: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        """The logarithmic mel spectrogram of (N,) samples: (mels, frames) float32."""
        import numpy as np  # noqa: PLC0415 - only for media

        found = self._extractor(
            samples,
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        frames = int(found["attention_mask"].sum())
        return np.ascontiguousarray(found["input_features"][0][:, :frames], dtype=np.float32)


def rows_of(frames: int, window: int) -> int:
    """The rows that the encoder makes of so many frames, which it takes in windows of so many."""
    rest = frames % window
    for _ in range(_HALVINGS):
        rest = (rest + 1) // 2
    return rest + frames // window * _ROWS_OF_A_WINDOW
