"""The contract of *stepped nodes*: stateless nodes one execution of which takes many calls of a module.

    start       a run: one execution of the node, which keeps its state on the node's device
    Call        a call of a module (a denoiser, mostly) that the run needs next
    compute     calls of several runs in one forward

A denoising loop of 50 steps is such a run. The engine computes the calls of different runs together where
their groups are equal and measurement shows a gain. Between two calls a run can be cancelled, reports its
progress, and may give a checkpoint. A family writes none of this for a node that is done in one forward: that
is a `models.base.StatelessNode`.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from models.base import Item, StatelessNode, StatelessResult
from models.programs import Going

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A call of a module that a run needs.

    Attributes:
        group: only calls of equal groups are computed together. It holds all that a forward has in common:
            the module, the shapes and types of tensors, the values of other arguments.
        inputs: of the call; only the node reads them.
        cost: counts towards the node's `max_cost`, if it has one.
        report: what the run reports since the call before; None for nothing.
    """

    group: Hashable
    inputs: Any
    cost: float = 1.0
    report: Going | None = None


class Run(Protocol):
    """One execution of a stepped node. The engine's thread calls it; `close` comes once, at its end."""

    def begin(self) -> Call | StatelessResult:
        """Compute up to the first call; the result if none is needed."""
        ...

    def take(self, result: Any) -> Call | StatelessResult:
        """Take the result of the call before, and compute up to the next one, or to the end."""
        ...

    def close(self) -> None:
        """Free what the run holds: it has ended, has failed, or is cancelled."""
        ...


class SteppedNode(Protocol):
    """A stateless node that runs in steps: `nodes.load` of a family returns it. One thread calls it.

    It may have the further members `max_cost` (the largest cost of several calls in one forward) and
    `encoder_cache`, as a `models.base.StatelessNode`.

    Attributes:
        max_batch: the most calls of one forward.
        max_runs: the most runs under way; further executions wait for one to end.
    """

    @property
    def max_batch(self) -> int: ...
    @property
    def max_runs(self) -> int: ...

    def start(self, item: Item, state: Mapping[str, "torch.Tensor"]) -> Run:
        """Start a run.

        Args:
            item: the input of the execution.
            state: the checkpoint of an interrupted run of the same execution (`Going.state`), from which to
                go on; empty: from the beginning.

        Raises:
            ClientError: the arguments are invalid.
            ValueError: the state cannot be used; the engine starts the run again without it.
        """
        ...

    def compute(self, calls: Sequence[Call]) -> list[Any]:
        """Compute calls of one group in one forward.

        Returns:
            the result of each call, which `Run.take` gets. It must not depend on the other calls beyond
            rounding.

        Raises:
            Exception: the engine computes each call by itself then; the run whose call fails alone fails.
        """
        ...


def is_stepped(node: "StatelessNode | SteppedNode") -> TypeGuard[SteppedNode]:
    """True for a node that runs in steps."""
    return hasattr(node, "start")
