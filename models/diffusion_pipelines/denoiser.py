"""The denoiser of a pipeline: runs of its `__call__`, the calls of different runs in one forward."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from models.base import Item
from models.diffusion_pipelines.batching import joined, rows_of, rule_of, split
from models.diffusion_pipelines.calls import takes_pictures
from models.diffusion_pipelines.components import DENOISERS
from models.diffusion_pipelines.lora import Adapters
from models.diffusion_pipelines.pipeline_run import PipelineRun
from models.diffusion_pipelines.previews import Previews
from models.diffusion_pipelines.proxies import VaeProxy, module_proxies
from models.diffusion_pipelines.text_encoder import CONDITION, recorded_results
from models.stepped import Call

MAX_BATCH: Final = 8
MAX_RUNS: Final = 16


class Denoiser:
    """`condition`, and `pictures` if there are any -> `latents`, packed (`models.stepped.SteppedNode`).

    Args:
        pipeline: with its denoiser and its VAE, without text encoders.
        device: of the denoiser.
    """

    def __init__(
        self, pipeline: Any, device: torch.device, *, max_batch: int = MAX_BATCH, max_runs: int = MAX_RUNS
    ) -> None:
        self.max_batch: Final = max_batch
        self.max_runs: Final = max_runs
        self.pipeline = pipeline
        self.device = device
        self.previews: Previews | None = measured_previews(pipeline)
        dtype = pipeline.vae.dtype
        _shed(pipeline.vae, keep_encoder=takes_pictures(type(pipeline)))
        self.proxies: Mapping[str, Any] = {
            **module_proxies(pipeline, DENOISERS),
            "vae": VaeProxy(pipeline.vae, dtype, device),
        }
        self._adapters = Adapters(pipeline, text=False, denoiser=True)

    def start(self, item: Item, state: Mapping[str, torch.Tensor]) -> PipelineRun:
        """Start the run of a request, see `models.stepped.SteppedNode.start`."""
        condition = item.inputs.get(CONDITION)  # absent for a class that reads the text itself
        results = recorded_results(condition, self.device) if condition is not None else []
        return PipelineRun(self, item, results, state)

    def compute(self, calls: Sequence[Call]) -> list[Any]:
        """Compute calls of one module in one forward, see `models.stepped.SteppedNode.compute`."""
        name, _, lora = calls[0].inputs
        module = getattr(self.pipeline, name)
        self._adapters.use(lora)
        rule = rule_of(module)
        if rule is None or len(calls) == 1:
            return [module(**call.inputs[1]) for call in calls]
        arguments = [call.inputs[1] for call in calls]
        output = module(**joined(rule, arguments))
        return split(output, [rows_of(rule, one) for one in arguments])


def _shed(vae: Any, *, keep_encoder: bool) -> None:
    """Free the weights of a VAE that a denoiser's node does not use."""
    for part in ("decoder",) if keep_encoder else ("decoder", "encoder"):
        if getattr(vae, part, None) is not None:
            setattr(vae, part, None)


def measured_previews(pipeline: Any) -> Previews | None:
    """The colours of latents; None for a VAE whose latents are no plain images."""
    vae = pipeline.vae
    channels = getattr(vae.config, "latent_channels", None)
    if type(vae).__name__ != "AutoencoderKL" or not channels:
        return None
    scale = vae.config.scaling_factor
    shift = getattr(vae.config, "shift_factor", None) or 0.0

    def decode(latents: torch.Tensor) -> torch.Tensor:
        placed = latents.to(vae.device, vae.dtype)
        pixels: torch.Tensor = vae.decode(placed / scale + shift, return_dict=False)[0]
        return pixels

    return Previews.measured(decode, channels)
