"""Decoder-only language models: the torch face.

`load` turns a checkpoint folder into a node for the KV-cache engine. The modules are transformers'
own; only the one modelling file the checkpoint names is imported, no Auto classes, no hub, no remote
code, no pickle. What cannot be served *exactly* is refused by name before a weight is read: the model
is first built without memory (on torch's meta device) and run once, with a probe in the place of
attention that sees what each layer would ask for, and with a probe in the place of the mask that sees
which keys transformers itself would let it look at.

This knows no pool and no requests: the engine says which attention function the layers go through.
"""

import re
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from safetensors import safe_open
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.utils import logging as transformers_logging

from shared.errors import BugError
from shared.models.base import KVLayout
from shared.models.checkpoint import (
    CheckpointError,
    UnsupportedArchitectureError,
    context_length,
    read_json,
)
from shared.models.weights import Shard, read_shards, weights_digest

NODE: Final = "llm"
"""The node's name in the graph."""

CPU_FLOAT32_BYTES: Final = 8 * 2**30
"""On a CPU, `auto` means float32 as long as the weights fit in this; CPUs compute it fastest."""

_PROBE: Final = "dalsegno_probe"
_NO_LIMIT: Final = 2**20
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HARMLESS: Final = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""Keyword arguments of attention that change nothing for packed causal attention over a pool."""
_OBEYED: Final = frozenset({"scaling", "sliding_window", "softcap"})
"""Those the engine's attention does as it is told."""

Progress = Callable[[int, int, str], None]
"""Called while weights load with bytes read, bytes in all, and the tensor's name; from several threads."""


class TokenStep(Protocol):
    """What of a step this node reads."""

    @property
    def positions(self) -> torch.Tensor: ...


class DecoderLM:
    """A decoder-only language model as the engine's node: embed, forward, head.

    Attributes:
        name: what its graph calls it.
        weights_digest: tells checkpoints apart (hex).
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        layout: KVLayout,
        max_positions: int,
        weights_digest: str,
    ) -> None:
        self.name: Final = name
        self.layout: Final = layout
        self.max_positions: Final = max_positions
        self.weights_digest: Final = weights_digest
        self.architecture: Final = type(model).__name__
        self._model = model
        self._head = _head_of(model)
        self._stock_attention: str = model.config._attn_implementation  # noqa: SLF001 - no public reader
        # A mask of four dimensions is taken as it is: without one, transformers looks for packed
        # sequences in the positions, which costs a host synchronisation per forward.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self.device, dtype=self.dtype)

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def use_attention(self, name: str) -> None:
        self._model.set_attn_implementation(name)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # The ids themselves: some models scale their embeddings inside of `forward`.
        return token_ids

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        given = {"inputs_embeds" if inputs.is_floating_point() else "input_ids": inputs[None]}
        output = self._model.base_model(
            **given, position_ids=step.positions[None], attention_mask=self._no_mask, use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def head(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        # By the model's own `forward`: behind the matrix some models scale or cap their logits.
        logits: torch.Tensor = self._head(inputs_embeds=hidden.index_select(0, indices)[None]).logits[0]
        return logits.float()

    @torch.inference_mode()
    def reference(self, token_ids: torch.Tensor) -> torch.Tensor:
        served = self._model.config._attn_implementation  # noqa: SLF001 - no public reader
        self._model.set_attn_implementation(self._stock_attention)
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(served)
        return logits.float()


def load(
    checkpoint: Path,
    node: str = NODE,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = lambda done, total, name: None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> DecoderLM:
    """The node of a checkpoint folder in Hugging Face format.

    Args:
        checkpoint: the folder.
        node: which of the graph's nodes; one alone has weights.
        device: where the weights go.
        progress: told about every tensor that is read.
        kwargs: the deployment's `model_kwargs`; this family has none of its own.
        dtype: `bfloat16`, `float16`, `float32` or `auto`: on a GPU what the checkpoint is stored in; on
            a CPU float32 as long as that takes no more than `CPU_FLOAT32_BYTES`, beyond it bfloat16.

    Raises:
        CheckpointError: something in the folder is missing, damaged or unsupported.
        UnsupportedArchitectureError: the model has layers that cannot be served over a paged pool.
    """
    if node != NODE:
        raise BugError(f"decoder_lm has no node {node!r} with weights; it has {NODE!r}")
    on = torch.device(device)
    raw = read_json(checkpoint / "config.json")
    if "quantization_config" in raw:
        raise UnsupportedArchitectureError(
            f"{checkpoint}: quantised checkpoints are not supported; expected float weights"
        )
    model_class = _model_class(raw, checkpoint)
    config = _config(model_class, raw, checkpoint)
    shards = read_shards(checkpoint)
    max_positions = _max_positions(config, raw)
    layout = _probe(model_class, config, max_positions)
    chosen = _choose_dtype(dtype, on, shards)
    model = _load_weights(model_class, config, shards, on, chosen, progress)
    return DecoderLM(
        model,
        name=node,
        layout=layout,
        max_positions=max_positions,
        weights_digest=weights_digest(shards),
    )


# ---- what the checkpoint says ----------------------------------------------------------------------

_NOT_THE_MODELS: Final = frozenset(
    {
        # How to compute is ours to say, and never the checkpoint's; some of these name code to fetch.
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "experts_implementation",
        "fusion_config",
        "auto_map",
        "torch_dtype",
        "dtype",
        # What else to give back; nobody here reads it.
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def _model_class(raw: Mapping[str, Any], checkpoint: Path) -> Any:
    """The class `config.json` names, from the one modelling file that holds it."""
    names, model_type = raw.get("architectures"), raw.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not isinstance(model_type, str):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: expected architectures and model_type, "
            f"found {names!r} and {model_type!r}"
        )
    module_name = model_type_to_module_name(model_type)  # gemma3_text is in gemma3
    is_plain = re.fullmatch(r"[a-z0-9_]+", module_name) and re.fullmatch(r"\w+ForCausalLM", name)
    refused = UnsupportedArchitectureError(
        f"{name} (model_type {model_type!r}) is not served: expected a decoder-only language model that "
        "transformers knows by itself (remote code is never run)"
    )
    if not is_plain:
        raise refused
    try:
        module = import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    except ModuleNotFoundError as error:
        raise refused from error
    model_class = getattr(module, name, None)
    if model_class is None:
        raise refused
    return model_class


def _config(model_class: Any, raw: Mapping[str, Any], checkpoint: Path) -> Any:
    try:
        config = model_class.config_class.from_dict(
            {k: v for k, v in raw.items() if k not in _NOT_THE_MODELS}
        )
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint / 'config.json'} makes no {model_class.__name__}: {type(error).__name__}: {error}"
        ) from error
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        # Dynamic angles are the plain ones up to `max_position_embeddings`, and no text is longer here;
        # to see that for itself, transformers would wait for the device in every forward.
        if isinstance(rope, dict) and rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"
    return config


def _max_positions(config: Any, raw: Mapping[str, Any]) -> int:
    """The longest text that is served; a model without a limit has states and no positions."""
    default = getattr(config, "max_position_embeddings", None)
    return context_length({"max_position_embeddings": default, **raw}) or _NO_LIMIT


def _choose_dtype(name: str, device: torch.device, shards: list[Shard]) -> torch.dtype:
    if name != "auto":
        if name not in _DTYPES:
            raise CheckpointError(f"dtype must be auto or one of {sorted(_DTYPES)}, found {name!r}")
        return _DTYPES[name]
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    if device.type == "cpu":
        is_small = sum(4 * tensor.elements for tensor in tensors) <= CPU_FLOAT32_BYTES
        return torch.float32 if is_small else torch.bfloat16
    largest = max(tensors, key=lambda tensor: tensor.elements)
    if largest.dtype not in _SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"the weights are stored as {largest.dtype}: expected one of {sorted(_SAFETENSORS_DTYPES)}"
        )
    return _SAFETENSORS_DTYPES[largest.dtype]


# ---- what the model would ask of its attention -----------------------------------------------------

_ANY_RULE: Final = "a rule that is neither causal nor a sliding window"


class _Probe:
    """What stands in the place of attention and mask while a model is run without memory.

    Attributes:
        shapes: of each layer, KV heads and their dimension.
        complaints: why the model is not served, if it is not.
    """

    def __init__(self, max_positions: int) -> None:
        self.shapes: Final[dict[int, tuple[int, int]]] = {}
        self.complaints: Final[list[str]] = []
        self._max_positions: Final = max_positions
        self._windows: Final[dict[int, int | str | None]] = {}  # what each layer says of itself
        self._masks: Final[list[tuple[torch.Tensor, int | str | None]]] = []

    def attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx
        complain = self.complaints.append
        if layer in self.shapes:
            complain(f"layer {layer} attends twice")
        self.shapes[layer] = (key.shape[1], key.shape[3])
        if value.shape != key.shape:
            complain(f"layer {layer}: keys {tuple(key.shape)} and values {tuple(value.shape)} differ")
        if not getattr(module, "is_causal", True):
            complain(f"layer {layer} is not causal")
        if getattr(module, "sinks", None) is not None:
            complain(f"layer {layer} has attention sinks")
        given = {k for k, v in kwargs.items() if v is not None and k not in _HARMLESS}
        if not kwargs.get("dropout"):
            given.discard("dropout")
        for what in sorted(given - _OBEYED):
            complain(f"layer {layer} needs {what}")
        self._windows[layer] = self._effective(kwargs.get("sliding_window"))
        return self._result(query, value)

    def compare_layers(self, layers: int) -> None:
        """Complain of layers that were not seen, or are not alike; once whatever else is wrong is known."""
        if not self.complaints and sorted(self.shapes) != list(range(layers)):
            missing = sorted(set(range(layers)) - set(self.shapes))
            self.complaints.append(f"layers {missing} do not go through the attention interface")
        if not self.complaints and len(set(self.shapes.values())) > 1:
            self.complaints.append(f"layers differ in their keys' shape: {sorted(set(self.shapes.values()))}")

    def masked_attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of the second run: compare what the layer says with what its mask would do.

        The pool reads the keyword; a model that leaves its window, or its chunks, to the mask alone would
        be right on a short text and wrong on a long one.
        """
        layer, rule = module.layer_idx, _ANY_RULE
        known = [window for mask, window in self._masks if mask is attention_mask]
        found = known[0] if known else (None if attention_mask is None else rule)
        if found != self._windows.get(layer):
            self.complaints.append(
                f"layer {layer} is masked by {_described(found)} in transformers, "
                f"but asks its attention for {_described(self._windows.get(layer))}"
            )
        return self._result(query, value)

    def compare_cache(self, cache: DynamicCache) -> None:
        """Compare what layers say with what `generate` would keep for them."""
        for layer, kept in enumerate(cache.layers):
            window = getattr(kept, "sliding_window", None)
            # The last W - 1 keys are kept, by a slice from -(W - 1) on: of a window of 1 that is all of them.
            found = self._effective(None if window == 1 else window)
            if not self.complaints and layer in self._windows and found != self._windows[layer]:
                self.complaints.append(
                    f"layer {layer} asks its attention for {_described(self._windows[layer])}, "
                    f"but its cache in transformers keeps {_described(found)}"
                )

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self._max_positions else window

    def mask(self, *, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
        """What `AttentionMaskInterface` calls: remember the rule by the mask that stands for it."""
        placeholder = torch.zeros(1, 1, 1, 1)
        self._masks.append((placeholder, _window_of(mask_function, self._max_positions)))
        return placeholder

    @staticmethod
    def _result(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def _probe(model_class: Any, config: Any, max_positions: int) -> KVLayout:
    """The layout of the model's keys and values.

    Raises:
        UnsupportedArchitectureError: a layer is not causal attention, whole or windowed, that goes
            through us.
    """
    name = model_class.__name__
    probe = _Probe(max_positions)
    complaints, shapes = probe.complaints, probe.shapes
    try:
        _run_on_meta(model_class, config, probe)
    except Exception as error:  # noqa: BLE001 - whatever a foreign model stumbles over, it is refused
        complaints.append(f"it cannot be run over a packed batch ({type(error).__name__}: {error})")
    if complaints:
        raise UnsupportedArchitectureError(
            f"{name} is not served: {complaints[0]}"
            + (f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else "")
            + "; expected causal attention in every layer, whole or over a sliding window, through "
            "transformers' attention interface"
        )
    kv_heads, head_dim = shapes[0]
    return KVLayout(layers=len(shapes), kv_heads=kv_heads, head_dim=head_dim)


def _run_on_meta(model_class: Any, config: Any, probe: _Probe) -> None:
    """Forwards of two packed tokens, without weights: shapes only.

    The first is run as the engine will run the model, the second with transformers making its own masks.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # grouped expert kernels accept nothing else
    AttentionInterface.register(_PROBE, probe.attention)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    try:
        with torch.device("meta"), torch.inference_mode():
            # A copy, for the model writes its attention into it.
            model = model_class(deepcopy(config)).eval()
            model.set_attn_implementation(_PROBE)
            ids = torch.zeros(1, 2, dtype=torch.int32)
            no_mask = torch.zeros(1, 1, 1, 1)
            model.base_model(input_ids=ids, position_ids=ids, attention_mask=no_mask, use_cache=False)
            probe.compare_layers(int(config.num_hidden_layers))
            if probe.complaints:
                return
            AttentionInterface.register(_PROBE, probe.masked_attention)
            all_seen = torch.ones(1, 2, dtype=torch.int64)
            model.base_model(input_ids=ids, position_ids=ids, attention_mask=all_seen, use_cache=False)
            probe.compare_cache(DynamicCache(config=config))
    finally:
        torch.set_default_dtype(previous)


def _window_of(mask_function: Callable[..., Any], positions: int) -> int | str | None:
    """The sliding window of a mask by transformers, over texts of so many tokens; None is causal."""
    keys = torch.arange(positions, device="cpu")

    def seen_by(query: int) -> torch.Tensor:
        at = torch.tensor(query, device="cpu")
        found: torch.Tensor = mask_function(torch.tensor(0, device="cpu"), at, at, keys)
        return found.cpu()

    try:
        window = int(seen_by(positions - 1).sum())
        for query in (0, positions // 2, positions - 1):
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(seen_by(query), expected):
                return _ANY_RULE
    except (RuntimeError, NotImplementedError):  # it reads tensors that are not there
        return _ANY_RULE
    return None if window >= positions else window


def _described(window: int | str | None) -> str:
    if isinstance(window, str):
        return window
    return "all that came before" if window is None else f"a window of {window}"


# ---- the head --------------------------------------------------------------------------------------


@dataclass
class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc] # transformers has no types
    """All that heads look for, most of it absent."""

    cross_attentions: None = None


class _Given(torch.nn.Module):
    """In the place of a model's body: gives back what it is given."""

    @property
    def decoder(self) -> "_Given":  # OPT calls a part of its body
        return self

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def _head_of(model: Any) -> Any:
    """The same model, weights shared, whose body is done already: hidden states in, logits out."""
    head = copy(model)
    head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _Given()}  # noqa: SLF001 - torch's own
    return head


# ---- weights ---------------------------------------------------------------------------------------


_RECOMPUTED: Final = "rotary_emb.inv_freq"
"""Stored by old checkpoints although it follows from `config.json`."""


class _Counter:
    """Adds up what the loader's threads read."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total = total
        self._progress = progress
        self._lock = Lock()
        self._done = 0

    def add(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total, name)


@dataclass(frozen=True, slots=True)
class _CountedSlice:
    """A tensor in a file, read when transformers' loader asks for it."""

    name: str
    nbytes: int
    slice: Any
    counter: _Counter

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.slice[index]
        self.counter.add(self.nbytes, self.name)
        return tensor


def _load_weights(
    model_class: Any,
    config: Any,
    shards: list[Shard],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> Any:
    """The model with its weights, through transformers' own renames, merges and ties.

    It gets the tensors and not the folder, so that it opens no file by itself.
    """
    transformers_logging.disable_progress_bar()
    counter = _Counter(sum(t.nbytes for shard in shards for t in shard.tensors.values()), progress)
    state: dict[str, _CountedSlice] = {}
    for shard in shards:
        file: Any = safe_open(shard.path, framework="pt", device="cpu")
        for name, tensor in shard.tensors.items():
            state[name] = _CountedSlice(name, tensor.nbytes, file.get_slice(name), counter)
    try:
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # refused below, by name: transformers' own error names none
            output_loading_info=True,
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {shards[0].path.parent} do not fit {model_class.__name__}: {error}"
        ) from error
    if wrong := sorted(info["mismatched_keys"]):
        name, found, expected = wrong[0]
        raise CheckpointError(
            f"the weights in {shards[0].path.parent} do not fit {model_class.__name__}: {len(wrong)} tensors "
            f"have another shape, {name} is {tuple(found)}, expected {tuple(expected)}; "
            "are config.json and the weights of one checkpoint?"
        )
    spare = {name for name in info["unexpected_keys"] if not name.endswith(_RECOMPUTED)}
    for names, what in ((info["missing_keys"], "lack"), (spare, "hold what has no place in")):
        if names:
            listed = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(
                f"the weights in {shards[0].path.parent} {what} {model_class.__name__}: "
                f"{len(names)} tensors, {listed}; are config.json and the weights of one checkpoint?"
            )
    # To the device afterwards: transformers places tensors by itself only with `accelerate` installed.
    return model.to(device).requires_grad_(requires_grad=False)
