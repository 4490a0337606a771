"""A node and the parts of prompts: their positions, their rows on its device, the input of its forward."""

from collections.abc import Mapping
from typing import Any

import torch

from shared.errors import BugError, TensorGone
from workers.data_plane.arrays import to_tensor
from workers.kv_engine.node import (
    FULL,
    KVNode,
    embed_width_of,
    full_ignores_window_of,
    masks_of,
    position_dtype_of,
    splice,
)
from workers.kv_engine.prompt_parts import PromptParts
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.step import Step


@torch.inference_mode()
def prompt_parts_of(node: KVNode, spec: SequenceSpec) -> PromptParts | None:
    """Return the parts of a sequence's prompt; None for a prompt of tokens alone.

    Raises:
        BugError: the node cannot compute such parts, or the rows do not fit them.
        TensorGone: the rows are gone.
    """
    if not spec.parts:
        return None
    if any(part.full for part in spec.parts) and FULL not in masks_of(node):
        raise BugError(f"node {node.name!r} declares no mask {FULL!r}, but a part of the prompt asks for it")
    make_positions = getattr(node, "positions", None)
    if make_positions is None:
        raise BugError(f"node {node.name!r} has no method positions: expected one, for prompts with media")
    positions, following = make_positions(spec.prompt_ids, spec.parts)
    make_routes = getattr(node, "routes", None)
    routes = None if make_routes is None else make_routes(spec.prompt_ids, spec.parts)
    return PromptParts(
        spec.prompt_ids,
        spec.parts,
        positions=positions.to("cpu", position_dtype_of(node)).numpy(),
        next_position=following,
        rows=_rows_of(node, spec),
        full_ignores_window=full_ignores_window_of(node),
        routes=None if routes is None else routes.to("cpu", torch.int8).numpy(),
    )


def _rows_of(node: KVNode, spec: SequenceSpec) -> torch.Tensor | None:
    """The rows on the node's device, in its dtype: (N, width)."""
    if spec.embeds is None:
        return None
    width = embed_width_of(node)
    if len(spec.embeds.shape) != 2 or spec.embeds.shape[1] != width:
        raise BugError(
            f"node {node.name!r} takes rows of shape (N, {width}), found {tuple(spec.embeds.shape)}"
        )
    try:
        return to_tensor(spec.embeds, node.device).to(node.dtype)
    except ValueError as error:
        raise TensorGone(f"the rows of {spec.key!r} cannot be read: {error}") from error


def inputs_of(node: KVNode, step: Step) -> Any:
    """Return the input of the node's `forward`: token ids, or embeddings of which some are replaced."""
    if step.row_values is None or step.row_indices is None:
        return node.embed(step.token_ids)
    return splice(node, step.token_ids, step.row_values, step.row_indices)


def forward_with_states(node: Any, step: Step) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Run a `workers.kv_engine.stream_nodes.StatesNode`; return hidden states, and by edge what to send."""
    found: tuple[torch.Tensor, Mapping[str, torch.Tensor]]
    found = node.forward_with_states(inputs_of(node, step), step)
    return found
