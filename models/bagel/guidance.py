"""The times of a flow, and classifier-free guidance: three velocities to one.

The formulas are those of the published code (ByteDance-Seed/Bagel, `Bagel.generate_image`): guidance by the
text is a precondition of guidance by images, and a scale of 1 or less is none. A velocity that has no weight
in a step is not asked for, and is not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from models.bagel.drawing import FlowRequest
from models.bagel.options import FlowSettings
from models.bagel.previews import LatentColors, is_shown, previews_of
from models.bagel.spans import Kind
from models.base import Item, StatelessResult

_TINY: Final = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a flow.

    Attributes:
        time: 1 is noise, 0 the image.
        length: the distance to the next time.
        by_text, by_images: the step is guided by them.
    """

    time: float
    length: float
    by_text: bool
    by_images: bool


def steps_of(settings: FlowSettings) -> tuple[Step, ...]:
    """The steps of a flow, one fewer than its times. Computed in float32, as published."""
    even = torch.linspace(1, 0, settings.num_timesteps)
    times = settings.timestep_shift * even / (1 + (settings.timestep_shift - 1) * even)
    low, high = settings.interval
    inside = ((times > low) & (times <= high)).tolist()
    by_text, by_images = settings.text_scale > 1, settings.text_scale > 1 and settings.img_scale > 1
    return tuple(
        Step(time=time, length=length, by_text=by_text and guided, by_images=by_images and guided)
        for time, length, guided in zip(
            times[:-1].tolist(), (times[:-1] - times[1:]).tolist(), inside[:-1], strict=True
        )
    )


def guided(
    settings: FlowSettings, main: torch.Tensor, text: torch.Tensor | None, images: torch.Tensor | None
) -> torch.Tensor:
    """The velocity of a step, (n, channels) float32.

    Args:
        settings: the scales, and the norm that is kept.
        main: the velocity behind the whole prompt.
        text: that behind the prompt without its last text; None in a step without guidance.
        images: that behind the texts alone; None in a step without guidance by images.
    """
    if text is None:
        return main
    by_text = text + settings.text_scale * (main - text)
    if settings.renorm == "text_channel":
        kept = _kept(main, by_text, settings.renorm_min, by_token=True)
        return kept if images is None else images + settings.img_scale * (kept - images)
    both = by_text if images is None else images + settings.img_scale * (by_text - images)
    return _kept(main, both, settings.renorm_min, by_token=settings.renorm == "channel")


def _kept(main: torch.Tensor, found: torch.Tensor, least: float, *, by_token: bool) -> torch.Tensor:
    """A guided velocity, scaled down to the norm of the one without guidance."""

    def norm(velocity: torch.Tensor) -> torch.Tensor:
        along = -1 if by_token else None
        found: torch.Tensor = torch.linalg.vector_norm(velocity, dim=along, keepdim=by_token)
        return found

    return found * (norm(main) / (norm(found) + _TINY)).clamp(min=least, max=1.0)


def first_latents(request: FlowRequest, channels: int, seed: int) -> torch.Tensor:
    """The noise that a flow begins with, (tokens, channels) float32 on the CPU.

    As in the published code it is drawn after the noise of the images that are to be changed.
    """
    generator = torch.Generator().manual_seed((seed + request.choice) % 2**63)
    for span in request.spans:
        if span.kind is Kind.VAE:
            torch.randn((span.tokens - 2) * channels, generator=generator)
    return torch.randn(request.tokens, channels, generator=generator)


def moved(latents: torch.Tensor, velocity: torch.Tensor, step: Step) -> torch.Tensor:
    """The latents after a step; a velocity points from the image to the noise."""
    return latents - velocity * step.length


class CombineCfg:
    """The stateless node `combine_cfg`: the velocities of three ranks to the latents of the next step.

    Inputs: `latents`, (n, channels), or (0,) for the noise of the request's seed; `time_index`, the number of
    the step; `v_main`, `v_text` and `v_img`, (n, channels), empty where a velocity is not asked for.

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
        main = item.inputs["v_main"]
        latents = item.inputs["latents"]
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
            outputs=outputs, progress=progress_of(number + 1, len(steps)), previews=previews
        )


def progress_of(step: int, steps: int) -> dict[str, Any]:
    """What is told about a flow of which `step` of `steps` steps are done."""
    return {"step": step, "steps": steps}
