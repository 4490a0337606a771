"""A naive engine for policies: one request at a time, keys and values in plain lists, torch's attention.

The node and its expert share the lists, as they share the cells of the engine's pool.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from models.base import Item
from models.programs import Driver, Mask, Pass
from models.robot_policy.flow import ActionFlow, PolicyNode
from models.robot_policy.tower import CameraEncoder
from workers.kv_engine.node import splice

_NAME = "naive_cells"
_now: dict[str, Any] = {}


def _attention(module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **__: Any) -> Any:
    keys, values = (
        torch.cat([*_now["cells"].get((module.layer_idx, name), []), new], dim=2)
        for name, new in (("k", key), ("v", value))
    )
    _now["new"] += [((module.layer_idx, "k"), key), ((module.layer_idx, "v"), value)]
    visible = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
    if _now["mask"] is Mask.CAUSAL:
        visible = visible.tril(keys.shape[2] - query.shape[2])
    found = scaled_dot_product_attention(query, keys, values, visible, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


def alone() -> None:
    """Let the following layers attend to their own tokens alone, all to all."""
    _now.update(cells={}, new=[], mask=Mask.FULL)


@torch.inference_mode()
def run(
    node: PolicyNode,
    driver: Driver,
    *,
    mask: Mask | None = None,
    shift: int = 0,
    timed: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> torch.Tensor:
    """The actions of a driver.

    Args:
        node: the KV node with its expert.
        driver: a run of the program.
        mask: in place of the driver's masks.
        shift: of the positions of the expert.
        timed: measures the time of the prefix, of the state, and of the steps, by these names.
    """
    backbones: dict[str, Any] = {"": node, **node.towers}
    for one in backbones.values():
        one.use_attention(_NAME)
    cells: dict[Any, list[torch.Tensor]] = {}
    length = 0
    while True:
        [asked] = driver.passes()
        part = "actions" if not asked.commits else "state" if asked.tower else "prefix"
        with timed(part):
            hidden, new = _pass(backbones[asked.tower], asked, cells, length, mask, shift)
        if asked.commits:
            length += asked.tokens
            for place, tensor in new:
                cells.setdefault(place, []).append(tensor)
        taken = driver.take([hidden])
        if taken is not None:
            assert isinstance(taken, Mapping)
            found: torch.Tensor = taken["actions"]
            return found


def _pass(
    backbone: Any, asked: Pass, cells: Any, length: int, mask: Mask | None, shift: int
) -> tuple[torch.Tensor, list[Any]]:
    assert asked.embeds is not None
    assert asked.positions is None, "they continue after the committed tokens"
    _now.update(cells=cells, new=[], mask=mask or asked.mask)
    first = length + (shift if asked.tower else 0)
    device, count = asked.embeds.device, asked.tokens
    positions, at = torch.arange(first, first + count, device=device), torch.arange(count, device=device)
    ids = torch.zeros(count, dtype=torch.int32, device=device)
    inputs = splice(backbone, ids, asked.embeds, at)
    step = SimpleNamespace(token_ids=ids, positions=positions)
    return backbone.forward(inputs, step), _now["new"]


def load(
    family: ModuleType, folder: Path, *, dtype: str = "auto", **kwargs: Any
) -> tuple[CameraEncoder, PolicyNode]:
    """The torch nodes of a checkpoint; `kwargs` are the deployment's."""

    def of(node: str) -> Any:
        return family.load(folder, node, dtype=dtype, progress=lambda *_: None, kwargs=kwargs)

    return of("vit_encoder"), of("LLM")


def driver(
    encoder: CameraEncoder, node: PolicyNode, *, pixels: Any, ids: list[int], state: Any, noise: torch.Tensor
) -> ActionFlow:
    """A run of the program `actions` with a given noise."""
    [found] = encoder.run([Item(inputs={"pixels": torch.as_tensor(np.asarray(pixels))}, args={})])
    assert not isinstance(found, Exception)
    return ActionFlow(
        node,
        node.expert,
        rows=found.outputs["rows"],
        token_ids=torch.tensor(ids),
        state=torch.as_tensor(np.asarray(state)),
        noise=noise,
        steps=node.expert.settings.steps,
    )
