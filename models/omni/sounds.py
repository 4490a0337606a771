"""Audio as the model hears it: a spectrogram, and the number of rows that the encoder makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from models.checkpoints.files import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Hearing:
    """Transformers' own feature extractor of a checkpoint.

    Args:
        rows_of: the rows that the encoder makes of so many frames.
        fills_up: a sound is followed by silence, as the published processor of the model has it, which
            completes its last frame. Else only whole frames count.

    Attributes:
        rate: samples per second.
        most: the most samples of a sound, if there is a limit.
    """

    def __init__(self, checkpoint: Path, rows_of: Callable[[int], int], *, fills_up: bool = False) -> None:
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
        self.most: Final[int | None] = found.n_samples if fills_up else None
        self._hop: Final[int] = found.hop_length
        self._rows_of: Final = rows_of
        self._fills_up: Final = fills_up

    def rows(self, samples: int) -> int:
        """The rows of so many samples; 0 if they are too few for a frame, which is mirrored at its ends."""
        if not self._fills_up and samples <= self._extractor.n_fft // 2:
            return 0
        return self._rows_of(self._frames(samples))

    def spectrogram(self, samples: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        """The logarithmic mel spectrogram of (N,) samples: (mels, frames) float32."""
        import numpy as np  # noqa: PLC0415 - only for media

        silence = -len(samples) % self._hop + self._extractor.n_fft if self._fills_up else 0
        found = self._extractor(
            np.pad(samples, (0, silence)),
            sampling_rate=self.rate,
            padding=True,
            truncation=False,
            return_tensors="np",
        )
        frames = self._frames(len(samples))
        return np.ascontiguousarray(found["input_features"][0][:, :frames], dtype=np.float32)

    def _frames(self, samples: int) -> int:
        return -(-samples // self._hop) if self._fills_up else samples // self._hop
