"""The times of a flow, and classifier-free guidance: three velocities to one.

The formulas are those of the published code (ByteDance-Seed/Bagel, `Bagel.generate_image`): guidance by the
text is a precondition of guidance by images, and a scale of 1 or less is none. A velocity that has no weight
in a step is not asked for, and is not computed.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from models.bagel.drawing import FlowRequest
from models.bagel.options import FlowSettings
from models.bagel.spans import CFG_IMG, CFG_TEXT, MAIN, Kind

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

    @property
    def branches(self) -> tuple[str, ...]:
        """The contexts whose velocities have a weight."""
        return (MAIN, *([CFG_TEXT] if self.by_text else []), *([CFG_IMG] if self.by_images else []))


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


def progress_of(step: int, steps: int) -> dict[str, Any]:
    """The progress of a flow of which `step` of `steps` steps are done."""
    return {"step": step, "steps": steps}
