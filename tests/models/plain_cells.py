"""A naive engine for programs: keys and values in plain tensors, one pass after the other, torch's attention.

No pool, no packing, no scheduler: the cost of a program without an engine, and a second opinion on its
results. A node and its towers share the cells, as they share the pool of the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from models.programs import Driver, Going, Mask, Pass, Turn
from workers.kv_engine.node import splice, towers_of

_NAME: Final = "plain_cells"
Cells = dict[tuple[int, str], torch.Tensor]
"""Keys and values by layer, (1, heads, tokens, head_dim)."""
Changed = Callable[[Pass, int], Pass]
_now: dict[str, Any] = {}


def _attention(
    module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float | None = None, **__: Any
) -> Any:
    cells: Cells = _now["cells"]
    _now["new"] |= {(module.layer_idx, "k"): key, (module.layer_idx, "v"): value}
    keys, values = (
        torch.cat([*([cells[at]] if (at := (module.layer_idx, name)) in cells else []), new], dim=2)
        for name, new in (("k", key), ("v", value))
    )
    visible = _visible(query.shape[2], keys.shape[2])
    seen = scaled_dot_product_attention(query, keys, values, visible, scale=scaling, enable_gqa=True)
    return seen.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


def _visible(queries: int, keys: int) -> torch.Tensor | None:
    """The keys that each query sees, (queries, keys); None: all."""
    mask, frame = _now["mask"]
    if mask is Mask.FULL:
        return None
    device = _now["device"]
    own = torch.arange(queries, device=device)
    ends = (own // frame + 1) * frame if mask is Mask.FRAMES else own + 1
    return torch.arange(keys, device=device)[None] < (ends + keys - queries)[:, None]


def alone(device: torch.device | str = "cpu") -> None:
    """Let the following layers attend to their own tokens alone, all to all."""
    _now.update(cells={}, new={}, mask=(Mask.FULL, 0), device=device)


@dataclass(slots=True)
class _Context:
    """The committed tokens of a context: their cells, and the largest position up to each of them."""

    cells: Cells = field(default_factory=dict)
    largest: list[int] = field(default_factory=list)

    def first(self, count: int) -> "_Context":
        return _Context({at: one[:, :, :count] for at, one in self.cells.items()}, self.largest[:count])


class PlainCells:
    """Computes the passes of one driver.

    Args:
        node: the KV node, with its towers.
        changed: changes a pass before it is computed, for controls; it gets the next position as well.
        timed: measures the time of each pass, by the name that `named` gives it.
    """

    def __init__(
        self,
        node: Any,
        *,
        changed: Changed = lambda asked, _: asked,
        timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
        named: Callable[[Pass], str] = lambda asked: "prompt" if asked.commits else "step",
    ) -> None:
        self._nodes: dict[str, Any] = {"": node, **towers_of(node)}
        self._changed, self._timed, self._named = changed, timed, named
        self._contexts: dict[str, _Context] = {}

    @torch.inference_mode()
    def run(self, driver: Driver) -> Mapping[str, torch.Tensor]:
        """Run a driver to its end, or to that of one iteration of its loop; return the outputs."""
        for one in self._nodes.values():
            one.use_attention(_NAME)
        while True:
            found = driver.take(self._round(driver.passes()))
            if isinstance(found, Turn):
                return found.outputs
            if found is not None and not isinstance(found, Going):
                return found

    def _round(self, passes: Sequence[Pass]) -> list[torch.Tensor]:
        for one in passes:
            if one.context not in self._contexts:
                origin = self._contexts[one.forks] if one.forks else _Context()
                self._contexts[one.context] = origin.first(len(origin.largest))
        return [self._computed(one) for one in passes]

    def _computed(self, asked: Pass) -> torch.Tensor:
        assert asked.logits is None, "the states are asked for"
        context = self._contexts[asked.context]
        if asked.after is not None:
            assert asked.after <= len(context.largest), "a pass is committed as it is, or not at all"
            context = self._contexts[asked.context] = context.first(asked.after)
        following = context.largest[-1] + 1 if context.largest else 0
        asked = self._changed(asked, following)
        positions = _positions(asked, following)
        with self._timed(self._named(asked)):
            hidden, new = self._forward(asked, context.cells, positions)
        if asked.commits:
            self._contexts[asked.context] = _extended(context, new, positions)
        return hidden

    def _forward(self, asked: Pass, cells: Cells, positions: torch.Tensor) -> tuple[torch.Tensor, Cells]:
        node, count = self._nodes[asked.tower], asked.tokens
        device = node.device
        new: Cells = {}
        _now.update(cells=cells, new=new, mask=(asked.mask, asked.frame_tokens), device=device)
        ids = torch.tensor(asked.ids or [0] * count, dtype=torch.int32, device=device)
        inputs = ids
        if asked.embeds is not None:
            inputs = splice(node, ids, asked.embeds, torch.arange(count, device=device))
        routes = None if asked.routes is None else asked.routes.to(device)
        step: Any = SimpleNamespace(token_ids=ids, positions=positions.to(device), routes=routes)
        return node.forward(inputs, step), new


def _positions(asked: Pass, following: int) -> torch.Tensor:
    """The rotary positions of a pass, (T,) or (axes, T)."""
    given = asked.positions
    if isinstance(given, torch.Tensor):
        return given
    if given is None:
        return torch.arange(following, following + asked.tokens)
    return torch.full((asked.tokens,), given)


def _extended(context: _Context, new: Cells, positions: torch.Tensor) -> _Context:
    """A context with the cells of a pass."""
    cells = {
        at: torch.cat([context.cells[at], one], dim=2) if at in context.cells else one
        for at, one in new.items()
    }
    before = max(context.largest, default=-1)
    flat = positions.reshape(-1, positions.shape[-1]).amax(0)
    largest = torch.cummax(torch.cat([torch.tensor([before]), flat.cpu()]), 0).values[1:]
    return _Context(cells, [*context.largest, *largest.tolist()])
