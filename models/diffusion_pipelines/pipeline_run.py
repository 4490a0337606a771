"""One run of a pipeline's `__call__`: it stops at each call of the denoiser (`models.stepped.Run`)."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import greenlet
import torch

from models.base import Item, StatelessResult
from models.diffusion_pipelines.batching import Digests, arguments_of, group_of, rows_of, rule_of
from models.diffusion_pipelines.calls import call_arguments
from models.diffusion_pipelines.packing import pack
from models.diffusion_pipelines.previews import Previews
from models.diffusion_pipelines.proxies import Decoding, ModuleCall, pipeline_of_run
from models.diffusion_pipelines.run_checkpoint import LATENTS, Checkpoints, Resumed, shape_of
from models.diffusion_pipelines.step_cache import Place, StepCache
from models.programs import Going
from models.stepped import Call
from shared.errors import ClientError

Z: Final = "z"
TIMESTEP: Final = "timestep"
SOUND: Final = "sound"


class Parts(Protocol):
    """The loaded pipeline, shared by its runs.

    Attributes:
        pipeline: with its modules.
        proxies: the attributes of a run's pipeline in the place of its modules.
        device: the modules' device.
        previews: the colours of latents.
    """

    pipeline: Any
    proxies: Mapping[str, Any]
    device: torch.device
    previews: Previews | None


class PipelineRun:
    """A run for one request.

    Args:
        results: of `encode_prompt`, in the order of its calls.
        state: the checkpoint to resume; empty: from the beginning.

    Raises:
        ValueError: the checkpoint cannot be used.
    """

    def __init__(
        self, parts: Parts, item: Item, results: list[Any], state: Mapping[str, torch.Tensor]
    ) -> None:
        self._parts, self._item = parts, item
        self._arguments = call_arguments(item, type(parts.pipeline))
        self._results = list(results)
        self._lora = item.args.get("lora")
        self._digests = Digests()
        self._cache = StepCache(float(item.args.get("step_cache") or 0.0))
        self._resumed = Resumed(state, parts.device) if state else None
        self._pipeline = pipeline_of_run(
            parts.pipeline,
            {**parts.proxies, "encode_prompt": self._encode_prompt, "decode_sound": self._decode_sound},
        )
        self._checkpoints = Checkpoints(self._pipeline.scheduler, self._cache, self._resumed)
        self._steps = 0  # of the schedule; 0 before the first call
        self._step = 0  # steps that are done
        self._calls = 0  # of this step so far
        self._computing: tuple[Place, Any] | None = None  # a call, and its input that changes
        self._report: Going | None = None  # of the steps since the last call
        self._sound: torch.Tensor | None = None
        self._greenlet: greenlet.greenlet | None = greenlet.greenlet(self._call)

    def begin(self) -> Call | StatelessResult:
        """Compute up to the first call of the denoiser.

        Raises:
            ClientError: the pipeline refuses the arguments.
        """
        try:
            return self._go_on(None)
        except ValueError as error:
            if self._steps:
                raise
            raise ClientError(f"the model does not take these arguments: {error}") from error

    def take(self, result: Any) -> Call | StatelessResult:
        """Take the output of the denoiser, and compute up to its next call, or to the end."""
        assert self._computing is not None, "the result of a call"
        place, changing = self._computing
        self._checkpoints.shapes.setdefault(place[0], shape_of(result))
        self._cache.keep(place, changing, result)
        self._calls += 1
        return self._go_on(result)

    def close(self) -> None:
        """End the run, wherever it is."""
        run, self._greenlet = self._greenlet, None
        if run is not None and run and not run.dead:
            run.throw(greenlet.GreenletExit)

    def _call(self) -> Decoding:
        """The body of the greenlet: the pipeline's own call, to its end."""
        taken = getattr(self._pipeline, "_callback_tensor_inputs", ())
        try:
            self._pipeline(
                **self._arguments,
                **({"callback_on_step_end": self._step_ended} if LATENTS in taken else {}),
            )
        except Decoding as end:
            return end
        raise RuntimeError(f"{type(self._pipeline).__name__} has not decoded its latents")

    def _go_on(self, answer: Any) -> Call | StatelessResult:
        """Answer the call before, and all further ones that need no forward."""
        assert self._greenlet is not None
        asked = self._greenlet.switch() if answer is None else self._greenlet.switch(answer)
        while isinstance(asked, ModuleCall):
            if not self._steps:
                self._steps = len(self._pipeline.scheduler.timesteps)
                self._checkpoints.begin()
            known = self._known(asked)
            if known is None:
                return self._next_call(asked)
            self._calls += 1
            asked = self._greenlet.switch(known)
        return self._result(asked)

    def _known(self, call: ModuleCall) -> Any:
        """The answer to a call that is not computed: of a skipped step, or of the cache."""
        if self._resumed is not None:
            return self._resumed.answer(call.module)
        if not self._cache.threshold:
            return None
        must = self._step == 0 or self._step >= self._steps - 1
        return self._cache.lookup(self._place(call), self._changing_input(call), must_compute=must)

    def _next_call(self, call: ModuleCall) -> Call:
        module = getattr(self._parts.pipeline, call.module)
        arguments = arguments_of(module, call)
        rule = rule_of(module)
        group = group_of(call.module, module, arguments, self._digests)
        changing = self._changing_input(call) if self._cache.threshold else None
        self._computing = (self._place(call), changing)
        report, self._report = self._report, None
        lora = tuple(sorted(self._lora.items())) if self._lora else None
        return Call(
            group=(group, lora) if group is not None else id(self),
            inputs=(call.module, arguments, self._lora),
            cost=float(rows_of(rule, arguments)) if rule else 1.0,
            report=report,
        )

    def _changing_input(self, call: ModuleCall) -> Any:
        """The input of a call that changes from step to step: a tensor, or a list of them."""
        module = getattr(self._parts.pipeline, call.module)
        rule = rule_of(module)
        arguments = arguments_of(module, call)
        if rule is not None:
            return arguments[rule.rows]
        return arguments.get("vision_tokens", arguments.get("hidden_states"))

    def _place(self, call: ModuleCall) -> Place:
        return call.module, self._calls

    def _encode_prompt(self, *_: Any, **__: Any) -> Any:
        """Answer with what the text encoder has recorded."""
        if not self._results:
            raise RuntimeError("the pipeline asks for more prompts than the text encoder has encoded")
        return self._results.pop(0)

    def _decode_sound(self, latents: torch.Tensor) -> None:
        """Keep the latents of the sound: its decoder is on the node of the VAE."""
        self._sound = latents

    def _step_ended(self, _: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """After each step: report it; store a checkpoint; or set the state of the one that is resumed."""
        self._step, self._calls = step + 1, 0
        if self._resumed is not None:
            if self._step < self._resumed.step:
                return tensors
            tensors = {**tensors, LATENTS: self._resumed.set(self._pipeline.scheduler, self._cache)}
            self._resumed = None
        latents = tensors[LATENTS]
        unsaid = self._report or Going(progress={})  # of steps that were not computed, by the cache
        self._report = Going(
            progress={"step": self._step, "steps": self._steps},
            previews={**unsaid.previews, **self._previews(latents)},
            state=self._checkpoints.after(self._step, self._steps, latents) or unsaid.state,
        )
        return tensors

    def _previews(self, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        wanted = int(self._item.args.get("partial_images") or 0)
        if self._parts.previews is None or not is_shown(self._step, self._steps, wanted):
            return {}
        return self._parts.previews.of(self._pipeline, latents, self._arguments)

    def _result(self, end: Any) -> StatelessResult:
        if not isinstance(end, Decoding):
            raise TypeError(f"expected the end of a run, found {type(end).__name__}")
        z, *rest = end.args or (end.kwargs.pop("z"),)
        timestep = rest[0] if rest else end.kwargs.get("temb")
        packed = {Z: z} | ({TIMESTEP: timestep} if timestep is not None else {})
        packed |= {SOUND: self._sound} if self._sound is not None else {}
        facts: dict[str, Any] = {"steps": self._steps}
        if self._cache.threshold:
            facts |= {"cached_calls": self._cache.reused, "cache_error": round(self._cache.error, 6)}
        return StatelessResult(outputs={LATENTS: pack(packed)}, facts=facts)


def is_shown(step: int, steps: int, wanted: int) -> bool:
    """Return whether a preview is due after `step` steps: `wanted` of them, evenly, none after the last."""
    return step in {round(steps * part / (wanted + 1)) for part in range(1, wanted + 1)} - {0, steps}
