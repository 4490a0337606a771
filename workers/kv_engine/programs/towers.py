"""The companion models of a node (*towers*): their pools, and the forwards over passes that name them.

A tower's pool has as many blocks as the node's, and a block number that a run has reserved stands for a block
in each pool. So a run reserves room once, and a context is of one pool. A tower that shares the node's cells
has no pool of its own: contexts may have passes of both. A step computes the passes of each tower in a
forward of its own, before the one of the node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from shared.errors import BugError
from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION, attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import KVNode, head_of, position_axes_of, towers_of
from workers.kv_engine.node_parts import inputs_of
from workers.kv_engine.programs.passes import PassSpan, add_passes, results_of
from workers.kv_engine.selfcheck import check_node
from workers.kv_engine.step import StepBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A companion model as it is served.

    Attributes:
        kernel: its attention kernel; None for the default of the device.
    """

    node: KVNode
    kernel: AttentionKernel | None = None


class Towers:
    """The node and its towers by name; the name of the node itself is empty.

    The constructor checks each tower as the engine checks its node (`selfcheck.check_node`).

    Args:
        node: the node of the engine.
        pool: of the node.
        slots: of each pool.
        served: the towers as they are served; None: those that the node has.
    """

    def __init__(
        self, node: KVNode, pool: PagedPool, *, slots: int, served: Mapping[str, Tower] | None = None
    ) -> None:
        if served is None:
            served = {name: Tower(node=tower) for name, tower in towers_of(node).items()}
        self.nodes: Final[dict[str, KVNode]] = {"": node}
        self.pools: Final[dict[str, PagedPool]] = {"": pool}
        for name, tower in served.items():
            if position_axes_of(tower.node) != position_axes_of(node) or tower.node.device != node.device:
                raise BugError(
                    f"tower {name!r} of node {node.name!r}: expected its device and number of position axes"
                )
            self.nodes[name] = tower.node
            if shares_cells(tower.node):
                _check_layout(name, tower.node, node)
                self.pools[name] = pool
            else:
                self.pools[name] = PagedPool.of(tower.node, slots=slots, kernel=tower.kernel)
            tower.node.use_attention(ATTENTION)
            check_node(tower.node, tower.kernel)

    def pool_name(self, tower: str) -> str:
        """Return the name of the tower whose pool has a tower's cells: its own, or empty for the node's."""
        return "" if shares_cells(self.nodes[tower]) else tower

    def results(self, builder: StepBuilder, passes: Sequence[PassSpan]) -> list[torch.Tensor]:
        """Compute passes of towers; return their results in the order of the passes.

        Args:
            builder: of the engine's steps: the node's own step is built after this.
            passes: in the order of their towers (`in_order`).
        """
        results: list[torch.Tensor] = []
        for name, tower in self.nodes.items():
            of_tower = [one for one in passes if one.asked.tower == name]
            if name and of_tower:
                step = add_passes(builder.build([one.span for one in of_tower]), of_tower)
                with attention_context(self.pools[name], step):
                    hidden = tower.forward(inputs_of(tower, step), step)
                results += results_of(of_tower, hidden, partial(head_of, tower))
        return results

    def in_order(self, passes: Sequence[PassSpan]) -> list[PassSpan]:
        """The passes of a step in the order of their results: those of the node, then tower by tower."""
        names = list(self.nodes)
        return sorted(passes, key=lambda one: names.index(one.asked.tower))

    def copy_cells(self, tower: str, source: int, target: int, cells: int, *, block_size: int) -> None:
        """Copy the first cells of a block to another one, in all layers of a tower."""
        pool = self.pools[tower]
        for layer in pool.stored:
            at = target * block_size
            layer[at : at + cells] = layer[source * block_size : source * block_size + cells]


def shares_cells(node: KVNode) -> bool:
    """Return whether a tower reads and writes the pool of its node."""
    return bool(getattr(node, "shares_cells", False))


def _check_layout(name: str, tower: KVNode, node: KVNode) -> None:
    if (tower.layout, tower.dtype) != (node.layout, node.dtype):
        raise BugError(
            f"tower {name!r} shares the cells of node {node.name!r}: expected {node.layout} in {node.dtype}, "
            f"found {tower.layout} in {tower.dtype}"
        )
