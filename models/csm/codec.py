"""The stateless node `codec_decoder`: frames of codes to sound, chunk by chunk."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from models.base import Item, StatelessResult
from shared.errors import BugError

_LOUDEST: Final = 32767


class CodecDecoder:
    """Mimi's decoder (`models.base.StatelessNode`). The samples of a chunk depend on its frames alone.

    The decoder is causal: n frames are n times as many samples as one, and the sound of a frame does not
    change with those after it.

    Args:
        model: transformers' codec.
        stream: the edge of the codes.
        end: the code that all of a frame are if it is the end of speech, which has no sound.
    """

    max_batch: Final = 8

    def __init__(self, model: Any, stream: str, *, end: int) -> None:
        self._model = model
        self._stream = stream
        self._end = end
        self._samples: Final = int(model.config.sampling_rate / model.config.frame_rate)

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Decode each item's chunk of codes, (frames, groups), to `audio`, (samples,) int16 on the CPU."""
        return [StatelessResult(outputs={"audio": self._decoded(item)}) for item in items]

    @torch.inference_mode()
    def _decoded(self, item: Item) -> torch.Tensor:
        chunk, codes = item.chunk, item.inputs[self._stream]
        if chunk is None:
            raise BugError("the codec takes chunks of a stream: expected a chunk in the item, found none")
        fresh = codes[len(codes) - chunk.fresh :]
        sounding = int((fresh != self._end).any(1).sum())
        if not sounding:
            return torch.zeros(0, dtype=torch.int16)
        frames = len(codes) - chunk.fresh + sounding  # the end is the last frame
        wave = self._model.decode(codes[:frames].long().T[None]).audio_values[0, 0]
        samples: torch.Tensor = wave[-sounding * self._samples :]
        return (samples.float().clamp(-1, 1) * _LOUDEST).to(torch.int16).cpu()
