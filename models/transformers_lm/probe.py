"""Check of a model's attention before its weights are read, and the layout of its keys and values.

The model is built without memory (on torch's meta device) and run twice: with a probe in place of the
attention function, which records what each layer asks for, and with a probe in place of the mask, which
records the keys that transformers would show to it. A model that cannot be served *exactly* is refused with
the reason.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, cache_utils

from models.base import INDEXES, CellShape, KVLayout, StateShape
from models.checkpoints.files import UnsupportedArchitectureError
from models.transformers_lm.architecture import body_of
from models.transformers_lm.attention_forms import CELLS, CHUNKS, SINKS, attach_forms, form_of
from models.transformers_lm.indexers import Indexed
from models.transformers_lm.recurrent import Recurrence, attach_recurrences, mixing_by

_PROBE: Final = "dalsegno_probe"
_IGNORED: Final = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""Keyword arguments of attention that have no effect on packed causal attention over a pool."""
_IMPLEMENTED: Final = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Keyword arguments that the engine's attention implements."""
_STORES_NOTHING: Final[Any] = getattr(cache_utils, "DummyLayer", ())
"""The class of cache layers without content, in the versions of transformers that have it."""
_STATELESS: Final = frozenset({"mlp", "moe"})
"""The kinds of layers that mix no tokens (Nemotron-H)."""
_NO_CELLS: Final = CellShape(0, 0, 0)
"""The cells of a layer without attention."""
_ANY_RULE: Final = "a rule that is neither causal nor a sliding window nor chunks"


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The rule that tokens see their own range of so many places."""

    size: int


_Rule = int | str | _Chunks | None
"""The keys that a layer sees: a window of so many, those of a rule, or all (None)."""


class _Probe:
    """The replacement of attention, mask and recurrent layers while a model runs without memory.

    Attributes:
        shapes: the cells of each layer with attention.
        states: the recurrent states of each layer that has any.
        needs: the forms of attention that a kernel has to declare.
        complaints: the reasons why the model cannot be served.
    """

    def __init__(self, max_positions: int) -> None:
        self.shapes: Final[dict[int, CellShape]] = {}
        self.states: Final[dict[int, tuple[StateShape, ...]]] = {}
        self.needs: Final[set[str]] = set()
        self.complaints: Final[list[str]] = []
        self._max_positions: Final = max_positions
        self._windows: Final[dict[int, _Rule]] = {}  # the rule that each layer asks for
        self._masks: Final[list[tuple[torch.Tensor, _Rule]]] = []

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
        form = form_of(module)
        is_latent = form is not None and form.latents is not None
        implemented, width = _IMPLEMENTED, key.shape[3]
        indexed = kwargs.get("indices")
        if is_latent and isinstance(indexed, Indexed):
            implemented |= {"indices"}
            self.needs.add(INDEXES)
            width += indexed.keys.shape[-1] if indexed.layer == layer else 0
        self.shapes[layer] = CellShape(key.shape[1], width, value.shape[3], is_latent)
        if value.shape[:3] != key.shape[:3]:
            complain(f"layer {layer}: keys {tuple(key.shape)} and values {tuple(value.shape)} differ")
        if not getattr(module, "is_causal", True):
            complain(f"layer {layer} is not causal")
        if kwargs.get("s_aux") is not None:
            self.needs.add(SINKS)
        elif getattr(module, "sinks", None) is not None:
            complain(f"layer {layer} has attention sinks that it does not pass on")
        given = {k for k, v in kwargs.items() if v is not None and k not in _IGNORED}
        if not kwargs.get("dropout"):
            given.discard("dropout")
        for what in sorted(given - implemented):
            complain(f"layer {layer} needs {what}")
        self._windows[layer] = self._effective(kwargs.get("sliding_window"))
        if form is not None and form.chunk is not None and form.chunk < self._max_positions:
            self.needs.add(CHUNKS)
            self._windows[layer] = _Chunks(form.chunk)
        return self._result(module, query, value)

    def mix(self, recurrence: Recurrence, hidden: torch.Tensor) -> torch.Tensor:
        """Record the states of a recurrent layer (`recurrent.mixing_by`)."""
        output, states = recurrence.run(hidden, None)
        if recurrence.layer in self.states:
            self.complaints.append(f"layer {recurrence.layer} has two recurrent modules")
        self.states[recurrence.layer] = tuple(
            StateShape(tuple(state.shape[1:]), is_float32=state.dtype != hidden.dtype) for state in states
        )
        for state in states:
            if state.dtype not in {hidden.dtype, torch.float32}:
                self.complaints.append(f"layer {recurrence.layer} keeps a state in {state.dtype}")
        return output

    def compare_layers(self, kinds: Sequence[str]) -> None:
        """Add a complaint for layers that are to mix tokens and did not; only if there is none yet."""
        known = {*self.shapes, *self.states}
        missing = [n for n, kind in enumerate(kinds) if n not in known and kind not in _STATELESS]
        if missing and not self.complaints:
            self.complaints.append(f"layers {missing} do not go through the attention interface")

    def layout(self, layers: int) -> KVLayout:
        """The layout of keys, values and states, of a model without complaints."""
        attending = [shape for _, shape in sorted(self.shapes.items())] or [_NO_CELLS]
        first = attending[0]
        if any(shape != first for shape in attending) or first.key != first.value or first.is_latent:
            self.needs.add(CELLS)
        shapes = tuple(self.shapes.get(layer, _NO_CELLS) for layer in range(layers))
        differ = CELLS in self.needs or any(shape != first for shape in shapes)
        return KVLayout(
            layers=layers,
            kv_heads=first.heads,
            head_dim=first.key,
            cells=shapes if differ else (),
            needs=frozenset(self.needs),
            states=tuple(self.states.get(layer, ()) for layer in range(layers)) if self.states else (),
        )

    def masked_attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention of the second run: compare the window that the layer asks for with that of its mask.

        The engine uses the keyword argument. A model that implements its window, or its chunks, by the mask
        alone would be right for short sequences and wrong for long ones.
        """
        layer, rule = module.layer_idx, _ANY_RULE
        known = [window for mask, window in self._masks if mask is attention_mask]
        found = known[0] if known else (None if attention_mask is None else rule)
        if found != self._windows.get(layer):
            self.complaints.append(
                f"layer {layer} is masked by {_described(found)} in transformers, "
                f"but asks its attention for {_described(self._windows.get(layer))}"
            )
        return self._result(module, query, value)

    def compare_cache(self, cache: DynamicCache) -> None:
        """Compare the windows that layers ask for with those of the cache that `generate` would use."""
        for layer, kept in enumerate(cache.layers):
            if isinstance(kept, _STORES_NOTHING):  # it attends to the keys of another layer
                continue
            window = getattr(kept, "sliding_window", None)
            # It keeps the last W - 1 keys, by a slice from -(W - 1): for a window of 1 these are all keys.
            found = self._effective(None if window == 1 else window)
            asked = self._windows.get(layer)
            if isinstance(asked, _Chunks):  # of which it keeps as many keys
                asked = asked.size
            if not self.complaints and layer in self._windows and found != asked:
                self.complaints.append(
                    f"layer {layer} asks its attention for {_described(self._windows[layer])}, "
                    f"but its cache in transformers keeps {_described(found)}"
                )

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self._max_positions else window

    def mask(self, *, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
        """The mask function of `AttentionMaskInterface`: record the rule of the mask that is returned."""
        placeholder = torch.zeros(1, 1, 1, 1)
        rule = _rule_of(mask_function, self._max_positions)
        if rule == _ANY_RULE:  # chunks begin after the padding, which has no memory here
            with _WithoutPadding():
                found = _rule_of(mask_function, self._max_positions)
            rule = found if isinstance(found, _Chunks) else rule
        self._masks.append((placeholder, rule))
        return placeholder

    @staticmethod
    def _result(module: Any, query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = query.new_empty((query.shape[2], query.shape[1], value.shape[3]))
        form = form_of(module)
        if form is not None:
            form.queries(query[0].transpose(0, 1), torch.zeros(len(out), device=out.device))
            out = form.outputs(out)
        return out[None], None


def probe_layout(model_class: Any, config: Any, max_positions: int) -> KVLayout:
    """The layout of the model's keys and values.

    Raises:
        UnsupportedArchitectureError: a layer is neither causal attention, full or over a sliding window,
            through transformers' attention interface, nor keeps its state in transformers' cache.
    """
    name = model_class.__name__
    probe = _Probe(max_positions)
    complaints = probe.complaints
    try:
        _run_on_meta(model_class, config, probe)
    except UnsupportedArchitectureError:  # of a sharded class: it has the reason
        raise
    except Exception as error:  # noqa: BLE001 - a model that raises anything is refused
        complaints.append(f"it cannot be run over a packed batch ({type(error).__name__}: {error})")
    if complaints:
        if getattr(config, "is_decoder", None) is False:
            complaints.insert(0, "config.json does not say is_decoder: true, so it is an encoder")
        raise UnsupportedArchitectureError(
            f"{name} is not served: {complaints[0]}"
            + (f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else "")
            + "; expected in every layer causal attention, whole, over a sliding window or in chunks, "
            "through transformers' attention interface, or a recurrent state in transformers' cache; "
            "docs/models.md lists architectures that are served"
        )
    return probe.layout(len(_kinds_of(config)))


def _run_on_meta(model_class: Any, config: Any, probe: _Probe) -> None:
    """Run two forwards of two packed tokens without weights: only shapes are computed.

    The first runs as in the engine, the second with transformers' own masks.
    """
    previous, validates = torch.get_default_dtype(), Distribution._validate_args  # noqa: SLF001 - no public reader
    torch.set_default_dtype(torch.bfloat16)  # grouped expert kernels accept nothing else
    Distribution.set_default_validate_args(False)  # it would read values
    AttentionInterface.register(_PROBE, probe.attention)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    try:
        with torch.device("meta"), torch.inference_mode():
            # A copy, because the model writes to it.
            model = model_class(_without_longrope(deepcopy(config))).eval()
            body = body_of(model)
            # For all hidden states, a model computes all layers for all tokens, with the masks as they are.
            body.config.output_hidden_states = True
            attach_forms(model)
            attach_recurrences(model)
            body.set_attn_implementation(_PROBE)
            ids = torch.zeros(1, 2, dtype=torch.int32)
            no_mask = torch.zeros(1, 1, 1, 1)
            with mixing_by(probe.mix):
                body(input_ids=ids, position_ids=ids, attention_mask=no_mask, use_cache=False)
            probe.compare_layers(_kinds_of(config))
            if probe.complaints:
                return
            _refuse_late_positions(body, model_class.__name__)
            AttentionInterface.register(_PROBE, probe.masked_attention)
            # On the CPU: models with recurrent layers, or whose config could have some, read its values.
            all_seen = torch.ones(1, 2, dtype=torch.int64, device="cpu")
            body(input_ids=ids, position_ids=ids, attention_mask=all_seen, use_cache=False)
            probe.compare_cache(DynamicCache(config=config))
    finally:
        torch.set_default_dtype(previous)
        Distribution.set_default_validate_args(validates)


def _without_longrope(config: Any) -> Any:
    """The config with plain rotary angles: Phimoe chooses by the values of positions, which `meta` lacks."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        rope["rope_type"] = "default"
    return config


def _refuse_late_positions(body: Any, name: str) -> None:
    """Refuse learned positions that begin after that of padding (RoBERTa and its descendants).

    Transformers computes them from the token ids in `forward`, and from 0 in `generate`, which therefore
    answers with other positions than those of the training: there is nothing to be equal to.

    Raises:
        UnsupportedArchitectureError: the model has such positions.
    """
    for path, module in body.named_modules():
        is_position = isinstance(module, torch.nn.Embedding) and "position" in path
        if is_position and module.padding_idx is not None:
            raise UnsupportedArchitectureError(
                f"{name} is not served: its positions begin at {module.padding_idx + 1}, after that of "
                "padding, but transformers' generate begins at 0, so its answers are not those of the model; "
                "for embeddings or scores use a checkpoint of its encoder"
            )


def _kinds_of(config: Any) -> Sequence[str]:
    """What transformers calls each layer; empty names for a model whose layers are all alike."""
    text = config.get_text_config(decoder=True)
    count = int(text.num_hidden_layers)
    kinds = getattr(text, "layer_types", None) or ()
    return kinds if len(kinds) == count else [""] * count


def _rule_of(mask_function: Callable[..., Any], positions: int) -> _Rule:
    """The rule of a transformers mask over `positions` tokens; None if it is fully causal."""
    places = torch.arange(positions, device="cpu")
    zero = torch.tensor(0, device="cpu")

    def seen_by(query: int) -> torch.Tensor:
        found: torch.Tensor = mask_function(zero, zero, torch.tensor(query, device="cpu"), places)
        return found.cpu()

    try:
        # The first query that does not see the first key is as far from it as a window, or a chunk, is long.
        sees_first: torch.Tensor = mask_function(zero, zero, places, zero)
        size = int(sees_first.cpu().int().argmin()) or positions
        queries = {0, positions // 2, positions - 1, *(q for q in (size, size + 1) if q < positions)}
        if all(torch.equal(seen_by(q), (places <= q) & (places > q - size)) for q in queries):
            return None if size >= positions else size
        if all(torch.equal(seen_by(q), (places <= q) & (places >= q - q % size)) for q in queries):
            return _Chunks(size)
    except (RuntimeError, NotImplementedError):  # it reads tensors without memory
        return _ANY_RULE
    return _ANY_RULE


class _WithoutPadding(TorchFunctionMode):
    """Inside, tensors without memory are zeros: the number of tokens by which a text is padded."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = [torch.zeros(a.shape, dtype=a.dtype, device="cpu") if _is_meta(a) else a for a in args]
        return func(*read, **(kwargs or {}))


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _described(rule: _Rule) -> str:
    if isinstance(rule, str):
        return rule
    if isinstance(rule, _Chunks):
        return f"chunks of {rule.size}"
    return "all previous tokens" if rule is None else f"a window of {rule}"
