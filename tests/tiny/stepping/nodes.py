"""The torch nodes: a denoiser that runs in steps, and a decoder.

A step moves the latents by a nonlinear map of themselves and of the text, and adds noise of the request's
seed: so each step, the text and the seed show in the picture. The map is wide, and takes about a millisecond.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import Item, StatelessNode, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.programs import Going
from models.stepped import Call, SteppedNode

CHECKPOINT_STEPS: Final = 10
"""The steps between two checkpoints."""
_WIDTH: Final = 1024


@cache
def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random weights: into the map (64, width), through it (width, width), and out of it (width, 64)."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((64, _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, 64))
    into, through, out = (torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in shapes)
    return into, through, out


def moved(latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The latents after one step without noise: (B, size), with texts of (B, 64)."""
    into, through, out = weights()
    padded = torch.nn.functional.pad(latents, (0, 64 - latents.shape[1]))
    hidden = ((padded + text) @ into).tanh() @ through
    return 0.9 * latents + (hidden.tanh() @ out)[:, : latents.shape[1]]


def embedded(ids: torch.Tensor) -> torch.Tensor:
    """The vector of a text, (64,)."""
    return torch.stack([torch.sin(ids.float() * (k + 1)).mean() for k in range(64)])


class Painting:
    """A run: the steps of one picture."""

    def __init__(self, item: Item, state: Mapping[str, torch.Tensor]) -> None:
        self._text = embedded(item.inputs["token_ids"])
        self._steps: int = item.args["steps"]
        self._noise = torch.Generator().manual_seed(item.seed % 2**63)
        self._size: int = item.args["size"]
        self._latents = self._drawn()
        self._done = 0
        while state and self._done < int(state["step"]):
            self._drawn()
            self._done += 1
        if state:
            self._latents = state["latents"]

    def begin(self) -> Call | StatelessResult:
        """The first call."""
        return self._call(None)

    def take(self, result: Any) -> Call | StatelessResult:
        """Add the noise, in place; a checkpoint now and then."""
        self._latents.copy_(result).add_(self._drawn(), alpha=0.1)
        self._done += 1
        if self._done == self._steps:
            return StatelessResult(outputs={"latents": self._latents})
        if self._done % CHECKPOINT_STEPS:
            return self._call(None)
        state = {"latents": self._latents, "step": torch.tensor(self._done)}
        return self._call(Going(progress={"step": self._done, "steps": self._steps}, state=state))

    def close(self) -> None:
        """Nothing is held."""

    def _drawn(self) -> torch.Tensor:
        return torch.randn(self._size, generator=self._noise)

    def _call(self, report: Going | None) -> Call:
        return Call(group=self._size, inputs=(self._latents, self._text), report=report)


class Denoiser:
    """The stepped node."""

    max_batch = 4
    max_runs = 8

    def start(self, item: Item, state: Mapping[str, torch.Tensor]) -> Painting:
        """Start a picture, or go on with one."""
        return Painting(item, state)

    def compute(self, calls: Sequence[Call]) -> list[Any]:
        """Move the latents of several pictures."""
        latents, texts = zip(*(call.inputs for call in calls), strict=True)
        return list(moved(torch.stack(latents), torch.stack(texts)))


class Decoder:
    """Latents to pixels."""

    max_batch = 4

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Squash each number into 0 to 1."""
        return [StatelessResult(outputs={"image": item.inputs["latents"].sigmoid()}) for item in items]


def load(
    checkpoint: Path,
    node: str,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: Progress = silent,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> StatelessNode | SteppedNode:
    """Make a node; the checkpoint is the tokenizer's alone."""
    return Denoiser() if node == "denoiser" else Decoder()
