"""The stateless node `dac`: frames of codes to sound, chunk by chunk.

DAC's decoder sees some frames on both sides, and no others: a chunk that is decoded with them has the samples
of the whole, but for rounding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from models.base import Item, StatelessResult
from models.checkpoints.files import CheckpointError
from models.dia.graph import LOOP, SAMPLE_RATE

_LOUDEST: Final = 32767
_EDGE: Final = 3
"""The samples on each side that a convolution over 7 sees: the first and the last one of the decoder."""
_UNITS: Final = 3 * (1 + 3 + 9)
"""Those that the three residual units of a block see, with their dilations."""


def frames_around(ratios: Sequence[int]) -> int:
    """The frames on each side of a frame that its samples depend on.

    Args:
        ratios: of the upsampling in each block, the first one first.
    """
    reach = _EDGE
    for ratio in reversed(ratios):
        reach = -(-(reach + _UNITS) // ratio) + 1
    return reach + _EDGE


class ChunkDecoder:
    """The decoder of a codec, chunk by chunk (`models.base.StatelessNode`).

    Args:
        decode: codes, (1, channels, frames) on the codec's device, to samples, any shape of frames * hop.
        hop: the samples of a frame.
        device: of the codec.
    """

    max_batch: Final = 8

    def __init__(
        self, decode: Callable[[torch.Tensor], torch.Tensor], *, hop: int, device: torch.device
    ) -> None:
        self._decode = decode
        self._hop = hop
        self._device = device

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Decode the fresh frames of each item's `codes`, (frames, channels), to `audio`, (samples,) int16.

        The last chunk ends the loop.
        """
        return [self._decoded(item) for item in items]

    @torch.inference_mode()
    def _decoded(self, item: Item) -> StatelessResult:
        before, fresh, is_last = item.inputs["span"].tolist()
        samples = torch.zeros(0, dtype=torch.int16)
        if fresh:
            wave = self._decode(item.inputs["codes"].long().T[None].to(self._device)).flatten()
            kept = wave[before * self._hop : (before + fresh) * self._hop]
            samples = (kept.float().clamp(-1, 1) * _LOUDEST).to(torch.int16).cpu()
        return StatelessResult(outputs={"audio": samples}, stops=(LOOP,) if is_last else ())


class Dac(ChunkDecoder):
    """DAC's decoder.

    Args:
        model: transformers' `DacModel`.

    Raises:
        CheckpointError: it is another codec than that of Dia.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.sampling_rate != SAMPLE_RATE or any(ratio % 2 for ratio in config.upsampling_ratios):
            raise CheckpointError(
                f"DAC: expected {SAMPLE_RATE} Hz and even upsampling_ratios, found {config.sampling_rate} Hz "
                f"and {config.upsampling_ratios}"
            )
        super().__init__(
            lambda codes: model.decode(audio_codes=codes).audio_values,
            hop=math.prod(config.upsampling_ratios),
            device=model.device,
        )
