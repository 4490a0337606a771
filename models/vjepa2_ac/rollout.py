"""The program `rollout`: a frame's latents follow from the frames before it, and its action and state.

A frame is one pass whose tokens are committed, so the frames before it are computed once. A node call in the
loop of the walk is one frame.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from models.programs import Mask, Pass, Turn
from models.vjepa2_ac.predictor import AcPredictor, normalized, positions_of

_CONTEXT: Final = "frames"


class Rollout:
    """One run of the program (`models.programs.Driver`).

    Its input `frame`, (1, patches, width), is that of the encoder, and later the one it predicted last, as
    the client has it.

    Args:
        controls: action, state and extrinsics of each step, (steps, 14 or 20).
        horizon: the frames to be predicted, at most the steps.
    """

    max_contexts = 1

    def __init__(
        self, network: AcPredictor, frame: torch.Tensor, controls: torch.Tensor, *, horizon: int
    ) -> None:
        self._network = network
        self._frame = frame
        self._controls = controls
        self._horizon = horizon
        self._step = 0
        self.max_tokens: Final = horizon * network.settings.frame_tokens
        self.counts: Final = {"forwards": 0}

    def passes(self) -> Sequence[Pass]:
        """The frame behind those that are committed."""
        rows = self._network.rows(self._frame[None], self._controls[None, self._step : self._step + 1])
        return [
            Pass(
                context=_CONTEXT,
                embeds=rows[0],
                positions=positions_of(self._network.settings, self._step),
                mask=Mask.FULL,
                commits=True,
            )
        ]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | Turn:
        """Give the latents of the next frame; the last one ends the run."""
        self._step += 1
        self.counts["forwards"] += 1
        outputs = {"frame": normalized(self._network.latents(hidden[0][None])[0])}
        return outputs if self._step == self._horizon else Turn(outputs=outputs)

    def more(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Take the frame that the next one follows."""
        self._frame = inputs["frame"].to(self._network.device)
