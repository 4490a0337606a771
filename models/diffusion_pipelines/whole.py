"""A pipeline of a class that is not served in parts: its own `__call__` from prompt to pixels, in one node.

The run stops after each step, where the class has a callback for it: it reports its progress there, and can
be cancelled. Runs of different requests are not computed together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import greenlet
import numpy as np
import torch

from models.base import Item, StatelessResult
from models.diffusion_pipelines.calls import call_arguments, parameters_of
from models.diffusion_pipelines.lora import Adapters
from models.diffusion_pipelines.pipeline_run import SOUND
from models.diffusion_pipelines.proxies import above, pipeline_of_run
from models.diffusion_pipelines.vae_decoder import FRAMES, frame_facts, uint8_of
from models.programs import Going
from models.stepped import Call
from shared.errors import ClientError

_CALLBACK: Final = "callback_on_step_end"
_VIDEO: Final = ("frames", "video", "videos")
_FRAME_DIMENSIONS: Final = 4


class WholePipeline:
    """prompt, and `pictures` if there are any -> `frames` (T, H, W, 3) uint8, `sound` (`models.stepped`).

    Args:
        safety_checker: the pipeline has a safety checker; it blackens what it flags, as in diffusers.
    """

    max_batch: Final = 1
    max_runs: Final = 1

    def __init__(
        self, pipeline: Any, *, safety_checker: str = "none", tiling: bool = False, slicing: bool = False
    ) -> None:
        self.pipeline = pipeline
        self.safety_checker: Final = safety_checker
        self.adapters = Adapters(pipeline, text=True, denoiser=True)
        vae = getattr(pipeline, "vae", None)
        if tiling and vae is not None:
            vae.enable_tiling()
        if slicing and vae is not None:
            vae.enable_slicing()

    def start(self, item: Item, state: Mapping[str, torch.Tensor]) -> "WholeRun":
        """Start the run of a request, see `models.stepped.SteppedNode.start`; it has no checkpoints."""
        if state:
            raise ValueError("a pipeline that runs whole has no checkpoints")
        return WholeRun(self, item)

    def compute(self, calls: Sequence[Call]) -> list[Any]:
        """Compute the next step of each run: `Run.take` does, since the modules are the pipeline's own."""
        return [True for _ in calls]


class WholeRun:
    """The run of a request, from step to step (`models.stepped.Run`)."""

    def __init__(self, node: WholePipeline, item: Item) -> None:
        self._node, self._item = node, item
        self._pipeline = pipeline_of_run(node.pipeline, {})
        self._greenlet: greenlet.greenlet | None = greenlet.greenlet(self._call)

    def begin(self) -> Call | StatelessResult:
        """Compute the first step.

        Raises:
            ClientError: the pipeline refuses the arguments.
        """
        try:
            return self._go_on(self._switch())
        except (ValueError, TypeError) as error:
            raise ClientError(f"the model does not take these arguments: {error}") from error

    def take(self, result: Any) -> Call | StatelessResult:
        """Compute the next step."""
        return self._go_on(self._switch())

    def close(self) -> None:
        """End the run after the step that it is in."""
        run, self._greenlet = self._greenlet, None
        if run is not None and run and not run.dead:
            run.throw(greenlet.GreenletExit)

    def _switch(self) -> Any:
        assert self._greenlet is not None
        self._node.adapters.use(self._item.args.get("lora"))
        return self._greenlet.switch()

    def _go_on(self, reached: Any) -> Call | StatelessResult:
        if isinstance(reached, Going):
            return Call(group=id(self), inputs=None, report=reached)
        return self._result(reached)

    def _call(self) -> Any:
        taken = parameters_of(type(self._pipeline))
        arguments = call_arguments(self._item, type(self._pipeline))
        further: dict[str, Any] = {"output_type": "np"} if "output_type" in taken else {}
        if _CALLBACK in taken:
            further[_CALLBACK] = _step_ended
        elif "callback" in taken:
            further["callback"] = _old_callback(self._pipeline)
        return self._pipeline(**arguments, **further)

    def _result(self, output: Any) -> StatelessResult:
        frames = _frames(output)
        flagged: list[bool] = getattr(output, "nsfw_content_detected", None) or []
        sound = _sound(output)
        facts = frame_facts(frames) | {
            "safety_checker": self._node.safety_checker,
            "flagged": any(flagged),
            "sound_rate": _sound_rate(self._pipeline) if sound.numel() else 0,
        }
        return StatelessResult(outputs={FRAMES: frames, SOUND: sound}, facts=facts)


def _step_ended(pipeline: Any, step: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Stop after a step, until the engine goes on."""
    above().switch(_progress(pipeline, step))
    return tensors


def _old_callback(pipeline: Any) -> Callable[..., None]:
    def stop(step: int, *_: Any) -> None:
        above().switch(_progress(pipeline, step))

    return stop


def _progress(pipeline: Any, step: int) -> Going:
    steps = getattr(pipeline, "_num_timesteps", None) or len(pipeline.scheduler.timesteps)
    return Going(progress={"step": step + 1, "steps": int(steps)})


def _frames(output: Any) -> torch.Tensor:
    """The pictures of an output, or the frames of its video, (T, H, W, 3) uint8; none of a sound.

    Raises:
        RuntimeError: the class makes something else.
    """
    for name in ("images", *_VIDEO):
        found = getattr(output, name, None)
        if found is not None:
            shown = np.asarray(found)
            while shown.ndim > _FRAME_DIMENSIONS:
                shown = shown[0]
            return uint8_of(shown[None] if shown.ndim < _FRAME_DIMENSIONS else shown)
    if getattr(output, "audios", None) is not None:
        return torch.zeros(0, 0, 0, 3, dtype=torch.uint8)
    raise RuntimeError(f"{type(output).__name__} holds no pictures, no video and no sound")


def _sound(output: Any) -> torch.Tensor:
    """The samples of an output, (channels, samples) float32."""
    found = getattr(output, "audios", None)
    found = getattr(output, "sound", None) if found is None else found
    if found is None:
        return torch.zeros(0, 0)
    waves = torch.as_tensor(np.asarray(found[0] if len(found) else found)).float()
    return waves[None] if waves.ndim == 1 else waves


def _sound_rate(pipeline: Any) -> int:
    """Samples per second, as the parts of the pipeline that make sound state it."""
    for name in ("sound_tokenizer", "vae", "vocoder"):
        part = getattr(pipeline, name, None)
        rate = getattr(getattr(part, "config", None), "sampling_rate", None)
        if rate:
            return int(rate)
    return 0
