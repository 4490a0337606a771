"""The contract of *programs*: node calls of a KV node that run several forward passes, not the token loop.

    open        contexts: sequences of keys and values, empty or forked from another one
    pass        a forward over some tokens of a context; committed ones extend it, others leave it unchanged
    take        the hidden states of the passes; the driver returns the outputs, or goes on with more passes

A flow loop over latents, block diffusion and a rollout over frames are programs. A KV node lists its programs
by name (`programs`). A call of the node runs one if the arguments of its walk name it: `{"program": "flow"}`.
The engine packs the passes of all requests, and the tokens of all sequences, into one forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch

PROGRAM: Final = "program"
"""The argument of a walk that names the program which its KV node runs."""


class Mask(StrEnum):
    """The tokens of a pass that a token of it sees; all of them see the whole context.

    CAUSAL: itself and the earlier ones. FULL: all. FRAMES: those of its own frame and of earlier frames.
    """

    CAUSAL = "causal"
    FULL = "full"
    FRAMES = "frames"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A forward over T tokens of a context. It is never split between two forwards.

    Attributes:
        context: the name of the context, among those of the program. Its first pass opens it.
        ids: T token ids; exactly one of `ids` and `embeds` is given.
        embeds: (T, hidden), on the node's device.
        positions: the rotary positions, (T,), or (axes, T) for a node with several axes; an int is the
            position of all of them; None continues after the context.
        mask: the tokens of the pass that see one another.
        frame_tokens: with `Mask.FRAMES`, the tokens of a frame; T is a multiple of it.
        commits: the context continues after these tokens. Otherwise the next pass does not see them.
        forks: for the first pass of a context: the context whose committed tokens it begins with.
    """

    context: str
    ids: Sequence[int] | None = None
    embeds: "torch.Tensor | None" = None
    positions: "torch.Tensor | int | None" = None
    mask: Mask = Mask.CAUSAL
    frame_tokens: int = 0
    commits: bool = False
    forks: str = ""

    @property
    def tokens(self) -> int:
        """T, the number of its tokens."""
        return len(self.ids) if self.ids is not None else (len(self.embeds) if self.embeds is not None else 0)


class Driver(Protocol):
    """One run of a program. It keeps its state on the node's device; the engine's thread calls it.

    Attributes:
        max_contexts: the most contexts that it opens.
        max_tokens: the most tokens of all its contexts, those of a pass included; forks count tokens that
            they share once. The engine reserves room for so many before the first pass.
    """

    @property
    def max_contexts(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

    def passes(self) -> Sequence[Pass]:
        """The next passes, at least one, each of another context. They may run in different forwards."""
        ...

    def take(self, hidden: Sequence["torch.Tensor"]) -> Mapping[str, "torch.Tensor"] | None:
        """Take the states after the last norm, (T, hidden) for each of the passes, in their order.

        Returns:
            the outputs of the node call, by edge; None if more passes follow.
        """
        ...


class Program(Protocol):
    """Starts a run. A KV node has them by name in its attribute `programs`."""

    def __call__(
        self, node: Any, inputs: Mapping[str, "torch.Tensor"], args: Mapping[str, Any], *, seed: int
    ) -> Driver:
        """Start a run.

        Args:
            node: the KV node as it is served: its layers may be computed by kernels of the engine.
            inputs: the inputs of the node call, on the node's device.
            args: the arguments of the walk.
            seed: of the request; all randomness must be derived from it.

        Raises:
            ClientError: the arguments are invalid.
        """
        ...
