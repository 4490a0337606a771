"""Check of a model's attention before its weights are read, and the layout of its keys and values.

The model is built without memory (on torch's meta device) and run twice: with a probe in place of the
attention function, which records what each layer asks for, and with a probe in place of the mask, which
records the keys that transformers would show to it. A model that cannot be served *exactly* is refused with
the reason.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from models.base import KVLayout
from models.checkpoints.files import UnsupportedArchitectureError

_PROBE: Final = "dalsegno_probe"
_IGNORED: Final = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""Keyword arguments of attention that have no effect on packed causal attention over a pool."""
_IMPLEMENTED: Final = frozenset({"scaling", "sliding_window", "softcap"})
"""Keyword arguments that the engine's attention implements."""
_ANY_RULE: Final = "a rule that is neither causal nor a sliding window"


class _Probe:
    """The replacement of attention and mask while a model runs without memory.

    Attributes:
        shapes: KV heads and their dimension, by layer.
        complaints: the reasons why the model cannot be served.
    """

    def __init__(self, max_positions: int) -> None:
        self.shapes: Final[dict[int, tuple[int, int]]] = {}
        self.complaints: Final[list[str]] = []
        self._max_positions: Final = max_positions
        self._windows: Final[dict[int, int | str | None]] = {}  # the window that each layer asks for
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
        given = {k for k, v in kwargs.items() if v is not None and k not in _IGNORED}
        if not kwargs.get("dropout"):
            given.discard("dropout")
        for what in sorted(given - _IMPLEMENTED):
            complain(f"layer {layer} needs {what}")
        self._windows[layer] = self._effective(kwargs.get("sliding_window"))
        return self._result(query, value)

    def compare_layers(self, layers: int) -> None:
        """Add a complaint for layers that did not attend, or differ in shape; only if there is none yet."""
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
        return self._result(query, value)

    def compare_cache(self, cache: DynamicCache) -> None:
        """Compare the windows that layers ask for with those of the cache that `generate` would use."""
        for layer, kept in enumerate(cache.layers):
            window = getattr(kept, "sliding_window", None)
            # It keeps the last W - 1 keys, by a slice from -(W - 1): for a window of 1 these are all keys.
            found = self._effective(None if window == 1 else window)
            if not self.complaints and layer in self._windows and found != self._windows[layer]:
                self.complaints.append(
                    f"layer {layer} asks its attention for {_described(self._windows[layer])}, "
                    f"but its cache in transformers keeps {_described(found)}"
                )

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window >= self._max_positions else window

    def mask(self, *, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
        """The mask function of `AttentionMaskInterface`: record the rule of the mask that is returned."""
        placeholder = torch.zeros(1, 1, 1, 1)
        self._masks.append((placeholder, _window_of(mask_function, self._max_positions)))
        return placeholder

    @staticmethod
    def _result(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def probe_layout(model_class: Any, config: Any, max_positions: int) -> KVLayout:
    """The layout of the model's keys and values.

    Raises:
        UnsupportedArchitectureError: a layer is not causal attention, full or over a sliding window, through
            transformers' attention interface.
    """
    name = model_class.__name__
    probe = _Probe(max_positions)
    complaints, shapes = probe.complaints, probe.shapes
    try:
        _run_on_meta(model_class, config, probe)
    except UnsupportedArchitectureError:  # of a sharded class: it has the reason
        raise
    except Exception as error:  # noqa: BLE001 - a model that raises anything is refused
        complaints.append(f"it cannot be run over a packed batch ({type(error).__name__}: {error})")
    if complaints:
        raise UnsupportedArchitectureError(
            f"{name} is not served: {complaints[0]}"
            + (f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else "")
            + "; expected causal attention in every layer, whole or over a sliding window, through "
            "transformers' attention interface; docs/models.md lists architectures that are served"
        )
    kv_heads, head_dim = shapes[0]
    return KVLayout(layers=len(shapes), kv_heads=kv_heads, head_dim=head_dim)


def _run_on_meta(model_class: Any, config: Any, probe: _Probe) -> None:
    """Run two forwards of two packed tokens without weights: only shapes are computed.

    The first runs as in the engine, the second with transformers' own masks.
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # grouped expert kernels accept nothing else
    AttentionInterface.register(_PROBE, probe.attention)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    try:
        with torch.device("meta"), torch.inference_mode():
            # A copy, because the model writes to it.
            model = model_class(deepcopy(config)).eval()
            model.base_model.set_attn_implementation(_PROBE)
            ids = torch.zeros(1, 2, dtype=torch.int32)
            no_mask = torch.zeros(1, 1, 1, 1)
            model.base_model(input_ids=ids, position_ids=ids, attention_mask=no_mask, use_cache=False)
            probe.compare_layers(int(config.get_text_config(decoder=True).num_hidden_layers))
            if probe.complaints:
                return
            AttentionInterface.register(_PROBE, probe.masked_attention)
            # On the CPU: models with recurrent layers, or whose config could have some, read its values.
            all_seen = torch.ones(1, 2, dtype=torch.int64, device="cpu")
            model.base_model(input_ids=ids, position_ids=ids, attention_mask=all_seen, use_cache=False)
            probe.compare_cache(DynamicCache(config=config))
    finally:
        torch.set_default_dtype(previous)


def _window_of(mask_function: Callable[..., Any], positions: int) -> int | str | None:
    """The sliding window of a transformers mask over `positions` tokens; None if it is fully causal."""
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
    except (RuntimeError, NotImplementedError):  # it reads tensors without memory
        return _ANY_RULE
    return None if window >= positions else window


def _described(window: int | str | None) -> str:
    if isinstance(window, str):
        return window
    return "all previous tokens" if window is None else f"a window of {window}"
