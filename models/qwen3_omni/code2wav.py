"""The stateless node `Code2Wav`: frames of codes to sound, chunk by chunk, without gaps between the chunks.

A frame is a fixed number of samples. But the decoder looks ahead: of n frames it makes fewer samples than
those of n frames, by its *delay*. Where chunks are decoded one by one, and the context of each is cut off,
the samples of the delay are lost at each border. They are in the next chunk too, just before its fresh
frames, so each chunk but the first begins that much earlier:

    frames of the sound     |0      |1      |2      |3      |4      |
    first chunk, 0 to 2     [---------------------]
    next one, context 2              (context)   [------------]        0 to 4, from the end of the first on

So the sound of n frames has as many samples as if it were decoded at once.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from models.base import Item, StatelessResult
from shared.errors import BugError

_LOUDEST: Final = 32767


class Code2Wav:
    """The codec's decoder (`models.base.StatelessNode`). The samples of a chunk depend on its frames alone.

    Args:
        model: transformers' code2wav of Qwen3-Omni, or another causal decoder of codes.
        stream: the edge of the codes.
        delay: the samples that it looks ahead. Default: those of code2wav.
    """

    max_batch: Final = 8

    def __init__(self, model: Any, stream: str, *, delay: int | None = None) -> None:
        self._model = model
        self._stream = stream
        self._samples: Final = int(model.total_upsample)
        self.delay: Final = delay_of(model.config.upsample_rates) if delay is None else delay

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Decode each item's chunk of codes, (frames, groups), to `audio`, (samples,) int16 on the CPU."""
        return [StatelessResult(outputs={"audio": self._decoded(item)}) for item in items]

    @torch.inference_mode()
    def _decoded(self, item: Item) -> torch.Tensor:
        chunk, codes = item.chunk, item.inputs[self._stream]
        if chunk is None:
            raise BugError("Code2Wav takes chunks of a stream: expected a chunk in the item, found none")
        if not chunk.fresh:
            return torch.zeros(0, dtype=torch.int16)
        context = len(codes) - chunk.fresh
        sound = self._model(codes.long().T[None])[0, 0]
        begin = max(0, context * self._samples - self.delay)
        samples: torch.Tensor = (sound[begin:].float().clamp(-1, 1) * _LOUDEST).to(torch.int16)
        return samples.cpu()


def delay_of(rates: Sequence[int]) -> int:
    """The samples that the decoder looks ahead, by its blocks that look at the next value too.

    Args:
        rates: the upsampling of each of these blocks. Those before them (`upsampling_ratios`) look at one
            value only.
    """
    delay = 0
    for rate in rates:
        delay = (delay + 1) * rate
    return delay
