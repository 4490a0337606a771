"""Engine settings of a worker: the checked `model_kwargs` of the deployment.

A model family's own keys stand next to the engine's: the family's graph names them, its nodes read them.
This module imports no torch, so a misspelt key is refused before anything is loaded.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from configs.checks import hint_for
from configs.deployment import ConfigError, DeploymentConfig
from configs.renamed_keys import RENAMED, warning, with_current_names
from models import registry
from models.base import EngineKind, ModelGraph
from shared.validation_errors import validation_problem
from workers.kv_engine.config import MAX_PASS_TOKENS

_LOGGER: Final = logging.getLogger(__name__)
_CHOSEN: Final = ("int8", "int4")
"""Values of `quantize` whose numbers are chosen by their errors."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a rank's engines.

    Attributes:
        dtype: of the weights and the KV pool; `auto` follows the device and the checkpoint.
        device: of the ranks that `devices` does not name; `auto` is this rank's GPU, or the CPU without one.
        block_size: tokens per block of the KV pool.
        max_step_tokens: the token budget of a step; None follows the device.
        max_pass_tokens: the most tokens of the forward passes of programs (image generation, for example) in
            a step, in addition to `max_step_tokens`. A longer pass is refused, because none is split.
        max_sequences: the most sequences that run at a time; None follows the device.
        prefix_cache: keep computed prefixes for later prompts that begin with them.
        state_snapshots: of models with recurrent states, how many states at ends of cached blocks are kept: a
            prefix is reused up to one of them; None is one per sequence.
        warm_prefixes: prefixes that are computed before the rank is ready: raw texts, or chats, which the
            checkpoint's template renders.
        decode_slowdown_limit: the most that prompts may lengthen a step: as a factor on the time of a step
            that decodes all sequences, waiting ones included; None is no limit.
        speculative_tokens: the most tokens drafted per sequence and step; 0 is no speculative decoding, and
            `auto` drafts as many as pay, where our CPU kernels compute the node: their results do not depend
            on how many rows are computed together.
        draft_model: folder of a smaller checkpoint that drafts tokens; without one, the draft is what
            followed the same tokens earlier in the text (prompt lookup).
        kernels: the code that computes a model's layers: `auto` is our own kernels where they support model
            and processor; `torch` is torch.
        attention: the attention kernel over the KV pool of a GPU, whatever computes the layers: `triton` is
            our kernel, `flashinfer` is FlashInfer; `auto` is our kernel where it is supported, else torch.
        quantize: the bits of the weights that our kernels multiply: `int8`, `int4` and, on a GPU, `fp8`
            quantise the checkpoint's while it is loaded; `auto` keeps what it stores; `none` makes floats of
            it.
        kv_cache: `int8` keeps keys and values in eight bits, which needs our CPU kernels; `auto` is `dtype`.
        calibration_text: a text file; weights are quantised so that the results for it change least.
        keep_quantised: keep integers that were chosen beside the checkpoint, for the next start.
        cuda_graphs: on a GPU, record decode steps at start and replay them.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_step_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_pass_tokens: Annotated[int, Meta(ge=1)] = MAX_PASS_TOKENS
    max_sequences: Annotated[int, Meta(ge=1, le=4096)] | None = None
    prefix_cache: bool = True
    state_snapshots: Annotated[int, Meta(ge=0, le=65_536)] | None = None
    warm_prefixes: list[Annotated[str, Meta(min_length=1)] | list[dict[str, Any]]] = []
    decode_slowdown_limit: Annotated[float, Meta(ge=1, le=1000)] | None = 1.7
    speculative_tokens: Literal["auto"] | Annotated[int, Meta(ge=0, le=32)] = "auto"
    draft_model: str | None = None
    kernels: Literal["auto", "torch"] = "auto"
    attention: Literal["auto", "triton", "flashinfer"] = "auto"
    quantize: Literal["auto", "int8", "int4", "fp8", "none"] = "auto"
    kv_cache: Literal["auto", "int8"] = "auto"
    calibration_text: str | None = None
    keep_quantised: bool = True
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.kernels == "torch" and (wanted := self.of_kernels):
            raise ValueError(f"{wanted[0]}: expected kernels auto with {wanted[1]}, found torch")
        if self.calibration_text is not None and self.quantize not in _CHOSEN:
            raise ValueError("calibration_text: expected none without quantize: int8 or int4")
        if self.warm_prefixes and not self.prefix_cache:
            raise ValueError("warm_prefixes: expected none with prefix_cache false: nothing would be kept")

    @property
    def drafts_have_to_pay(self) -> bool:
        """True if tokens are drafted where measurements say that it pays, and not where they do not."""
        return self.speculative_tokens == "auto"

    @property
    def quantises(self) -> bool:
        """True if weights are quantised while they are loaded."""
        return self.quantize in (*_CHOSEN, "fp8")

    @property
    def keeps_quantised(self) -> bool:
        """True if what is quantised is kept beside the checkpoint; floats of eight bits are not chosen."""
        return self.keep_quantised and self.quantize in _CHOSEN

    @property
    def of_kernels(self) -> tuple[str, str] | None:
        """A key and its value that nothing but our kernels computes; None if there is none."""
        if self.quantises:
            return "quantize", self.quantize
        return ("kv_cache", self.kv_cache) if self.kv_cache != "auto" else None

    def max_sequences_on(self, device_type: str) -> int:
        """The most sequences that run at a time on a device of this type."""
        return self.max_sequences or (256 if device_type == "cuda" else 64)

    def state_snapshots_on(self, device_type: str) -> int:
        """The slots for snapshots of recurrent states on a device of this type."""
        if not self.prefix_cache:
            return 0
        return self.max_sequences_on(device_type) if self.state_snapshots is None else self.state_snapshots

    def max_step_tokens_on(self, device_type: str) -> int:
        """The token budget of a step on a device of this type.

        Raises:
            ConfigError: the budget is below one token per sequence.
        """
        sequences = self.max_sequences_on(device_type)
        # In addition to one token of every decoding sequence: else a prompt would wait for one token of room.
        tokens = self.max_step_tokens or sequences + (4096 if device_type == "cuda" else 2048)
        if tokens < sequences:
            raise ConfigError(
                f"model_kwargs.max_step_tokens is {tokens}: expected at least max_sequences, "
                f"which is {sequences}"
            )
        return tokens


def of(config: DeploymentConfig) -> EngineSettings:
    """Return the engine settings of a deployment.

    Raises:
        ConfigError: an unknown key or an invalid value; the message names the key and what is expected.
    """
    graph = registry.graph(config.model)
    found = parse(config.model_kwargs, graph.kwargs)
    if (wanted := found.of_kernels) and (reason := _without_kernels(config, graph)):
        raise ConfigError(f"model_kwargs.{wanted[0]} is {wanted[1]}, but the model {reason}: leave it out")
    return found


def _without_kernels(config: DeploymentConfig, graph: ModelGraph) -> str | None:
    """The reason why none of our kernels computes what is wanted of a model; None if one may."""
    if EngineKind.KV not in graph.nodes.values():
        return "has no node with layers of a language model"
    if config.takes_adapters:
        return "takes adapters, which torch computes"
    if any(group.followers for group in config.groups):
        return "is shared by ranks (tp_size), which compute with floats"
    return None


def parse(kwargs: Mapping[str, Any], own: Collection[str] = ()) -> EngineSettings:
    """Return the engine settings in `model_kwargs`; `own` are the family's own keys (`ModelGraph.kwargs`).

    Raises:
        ConfigError: an unknown key or an invalid value; the message names the key and what is expected.
    """
    try:
        current, renamed = with_current_names(kwargs, own)
    except ValueError as error:
        raise ConfigError(f"model_kwargs: {error}") from error
    for old, new in renamed.items():
        _LOGGER.warning("%s", warning(old, new))
    known = [*(field.name for field in msgspec.structs.fields(EngineSettings)), *sorted(own)]
    for key in current:
        if key not in known:
            names = dict(zip(known, known, strict=True))
            hint = hint_for(str(key), {**RENAMED, **names}, listed=known)
            raise ConfigError(f"model_kwargs: unknown key {key}; {hint}")
    given = {key: value for key, value in current.items() if key not in own}
    try:
        return msgspec.convert(given, EngineSettings)
    except msgspec.ValidationError as error:
        problem = validation_problem(error, given, EngineSettings)
        raise ConfigError(f"model_kwargs.{problem.message}") from error
