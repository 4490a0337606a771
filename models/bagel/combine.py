"""The stateless node `combine_cfg`, of placements with a branch of guidance on each of three ranks."""

from collections.abc import Sequence

import msgspec
import torch

from models.bagel.drawing import LOOP, FlowRequest
from models.bagel.guidance import first_latents, guided, moved, progress_of, steps_of
from models.bagel.previews import LatentColors, is_shown, previews_of
from models.base import Item, StatelessResult


class CombineCfg:
    """The velocities of three ranks to the latents of the next step.

    Inputs: `latents`, (n, channels), or (0,) for the noise of the request's seed; `time_index`, the number of
    the step; `v_main`, `v_text` and `v_img`, (n, channels), empty where a velocity is not asked for. All are
    empty in the iteration in which the language models take their room: it is no step.

    Args:
        colors: of latents, for previews; None: there are none.
    """

    max_batch = 16

    def __init__(self, colors: LatentColors | None = None) -> None:
        self._colors = colors

    @torch.inference_mode()
    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Take one step of each flow."""
        return [self._step(item) for item in items]

    def _step(self, item: Item) -> StatelessResult:
        request = msgspec.convert(item.args, FlowRequest)
        steps, number = steps_of(request.flow), int(item.inputs["time_index"])
        main, latents = item.inputs["v_main"], item.inputs["latents"]
        if not main.numel():
            return StatelessResult(outputs={"latents": latents, "time_index": item.inputs["time_index"]})
        if not latents.numel():
            latents = first_latents(request, main.shape[1], item.seed).to(main.device)
        step = steps[number]
        # A branch with the same prompt as the main one sends nothing.
        text, images = (
            item.inputs[name] if item.inputs[name].numel() else main for name in ("v_text", "v_img")
        )
        velocity = guided(
            request.flow, main, text if step.by_text else None, images if step.by_images else None
        )
        outputs = {
            "latents": moved(latents, velocity, step),
            "time_index": torch.tensor([number + 1], device=main.device),
        }
        previews = {}
        if is_shown(number + 1, len(steps), request.flow.partial_images):
            previews = previews_of(self._colors, latents, velocity, step.time, request.grid)
        return StatelessResult(
            outputs=outputs,
            stops=(LOOP,) if number + 1 == len(steps) else (),
            progress=progress_of(number + 1, len(steps)),
            previews=previews,
        )
