"""The torch nodes: a language model with the program `flow`, and two nodes around it.

The program is flow matching over latents behind two contexts, with guidance. The first token of a text is a
context, and the whole text another one that is forked from it. In each step, the latents attend to a context
and to one another, at one position. The velocity is that without the text, plus `SCALE` times the difference
that the text makes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from models.base import Item, StatelessNode, StatelessResult
from models.checkpoints.progress import Progress, silent
from models.programs import Driver, Going, Mask, Pass
from models.transformers_lm.loader import load_decoder
from models.transformers_lm.node import DecoderLM

CHANNELS: Final = 4
SCALE: Final = 3.0
CHECKPOINT_STEPS: Final = 5
"""The steps between two checkpoints."""


class Weights:
    """The projections between latents and hidden states, the same for each width."""

    def __init__(self, hidden: int) -> None:
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.3

        self.into, self.out = random(CHANNELS, hidden), random(hidden, CHANNELS)
        self.time, self.place = random(hidden), random(64, hidden)

    def embeds(self, latents: torch.Tensor, time: float) -> torch.Tensor:
        """The embeddings of latents, (T, hidden), at a time of the flow."""
        return latents @ self.into + time * self.time + self.place[: len(latents)]


def times(steps: int) -> list[float]:
    """The times of the flow, from 1 to 0."""
    return [1 - step / steps for step in range(steps + 1)]


class Flow:
    """The driver of the program."""

    def __init__(self, weights: Weights, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any]) -> None:
        self._weights = weights
        self._ids: list[int] = inputs["token_ids"].tolist()
        self._latents = inputs["latents"]
        self._times = times(args["steps"])
        self._rounds = 0
        self._resumed = 0
        self.max_contexts = 2
        self.max_tokens = len(self._ids) + 2 * len(self._latents)

    def passes(self) -> Sequence[Pass]:
        """The first token; the rest of the text behind a fork; then the latents behind both, in each step."""
        if self._rounds == 0:
            return [Pass(context="free", ids=self._ids[:1], commits=True)]
        if self._rounds == 1:
            return [Pass(context="text", ids=self._ids[1:], commits=True, forks="free")]
        embeds = self._weights.embeds(self._latents, self._times[self._rounds - 2])
        return [
            Pass(context=name, embeds=embeds, positions=position, mask=Mask.FULL)
            for name, position in (("free", 1), ("text", len(self._ids)))
        ]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | Going | None:
        """Take one step of the flow; the last one gives the latents."""
        step, self._rounds = self._rounds - 2, self._rounds + 1
        if step < 0:
            self._rounds += self._resumed if self._rounds == 2 else 0
            return None
        free, text = (states.float() @ self._weights.out for states in hidden)
        velocity = free + SCALE * (text - free)
        self._latents = self._latents - velocity * (self._times[step] - self._times[step + 1])
        if step + 2 == len(self._times):
            return {"latents": self._latents}
        return self._report(step + 1) if (step + 1) % CHECKPOINT_STEPS == 0 else None

    def _report(self, steps: int) -> Going:
        state = {"latents": self._latents, "step": torch.tensor(steps)}
        return Going(progress={"step": steps, "steps": len(self._times) - 1}, state=state)

    def resume(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on after a checkpoint: the contexts are computed again, and no step of the flow twice."""
        self._latents = state["latents"]
        self._resumed = int(state["step"])


class FlowLM(DecoderLM):
    """A language model with the program `flow`."""

    masks = frozenset({"causal", "full"})

    def __init__(self, decoder: DecoderLM) -> None:
        super().__init__(
            decoder.model,
            name=decoder.name,
            layout=decoder.layout,
            max_positions=decoder.max_positions,
            weights_digest=decoder.weights_digest,
        )
        self.weights: Final = Weights(decoder.model.config.hidden_size)
        self.programs: Final = {"flow": self._start}

    def _start(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Driver:
        assert node.name == self.name, f"the node as it is served, and its request's seed {seed}"
        return Flow(self.weights, inputs, args)


class Noise:
    """The first latents, by the request's seed."""

    max_batch = 8

    def run(self, items: Sequence[Item]) -> list[StatelessResult | Exception]:
        """Draw them."""

        def draw(item: Item) -> torch.Tensor:
            generator = torch.Generator().manual_seed(item.seed % 2**63)
            return torch.randn(item.args["latents"], CHANNELS, generator=generator)

        return [StatelessResult(outputs={"latents": draw(item)}) for item in items]


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
) -> DecoderLM | StatelessNode:
    """Load a node; only `llm` has a checkpoint."""
    if node == "noise":
        return Noise()
    if node == "decoder":
        return Decoder()
    return FlowLM(load_decoder(checkpoint, node, device=device, dtype=dtype, progress=progress))
