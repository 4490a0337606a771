"""A program: flow matching over latents behind two contexts, with guidance; and a naive oracle of it.

The first token of a text is a context, and the whole text another one that is forked from it. In each step,
the latents attend to a context and to one another, at one position. The velocity is that without the text,
plus `SCALE` times the difference that the text makes.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from models.programs import Driver, Mask, Pass
from models.transformers_lm.node import DecoderLM
from tests.workers.cpu_kernels import models
from workers.data_plane.arrays import to_array
from workers.data_plane.port import Array
from workers.kv_engine.programs.spec import ProgramSpec

CHANNELS: Final = 4
SCALE: Final = 3.0


class Weights:
    """The projections between latents and hidden states."""

    def __init__(self, hidden: int) -> None:
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.3

        self.into, self.out = random(CHANNELS, hidden), random(hidden, CHANNELS)
        self.time, self.place = random(hidden), random(64, hidden)

    def embeds(self, latents: torch.Tensor, time: float) -> torch.Tensor:
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
        self._step = -1
        self.max_contexts = 2
        self.max_tokens = len(self._ids) + 2 * len(self._latents)

    def passes(self) -> Sequence[Pass]:
        if self._step == -1:
            first = Pass(context="free", ids=self._ids[:1], commits=True)
            return [first]
        if self._step == 0 and len(self._ids) > 1:
            return [Pass(context="text", ids=self._ids[1:], commits=True, forks="free")]
        embeds = self._weights.embeds(self._latents, self._times[self._step - 1])
        return [
            Pass(context=name, embeds=embeds, positions=position, mask=Mask.FULL)
            for name, position in (("free", 1), ("text", len(self._ids)))
        ]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        self._step += 1
        if self._step < 2:
            return None
        free, text = (states.float() @ self._weights.out for states in hidden)
        velocity = free + SCALE * (text - free)
        self._latents = self._latents - velocity * (self._times[self._step - 2] - self._times[self._step - 1])
        return {"latents": self._latents} if self._step == len(self._times) else None


class FlowNode(DecoderLM):
    """A decoder with the program `flow`."""

    masks = frozenset({"causal", "full"})

    def __init__(self, decoder: DecoderLM) -> None:
        super().__init__(
            decoder.model,
            name=decoder.name,
            layout=decoder.layout,
            max_positions=decoder.max_positions,
            weights_digest="",
        )
        self.weights = Weights(decoder.model.config.hidden_size)
        self.programs = {"flow": self._flow}

    def _flow(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Driver:
        assert node.name == self.name
        return Flow(self.weights, inputs, {**args, "seed": seed})


def flow_node(**changes: Any) -> FlowNode:
    """A small Qwen3 with the program, with the same weights at each call."""
    return FlowNode(models.node(**changes))


def inputs_of(number: int, *, tokens: int, latents: int) -> tuple[list[int], torch.Tensor]:
    """The text and the first latents of one request; random, by its number."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(models.VOCABULARY, (tokens,), generator=generator).tolist()
    return ids, torch.randn(latents, CHANNELS, generator=generator)


def spec(key: str, ids: list[int], latents: torch.Tensor, *, steps: int = 4) -> ProgramSpec:
    """The call of the program."""
    given: dict[str, Array] = {
        "token_ids": to_array(torch.tensor(ids, dtype=torch.int32)),
        "latents": to_array(latents),
    }
    return ProgramSpec(key=key, program="flow", inputs=given, args={"steps": steps}, seed=7)


@torch.inference_mode()
def oracle(
    node: FlowNode, ids: list[int], latents: torch.Tensor, *, steps: int = 4, is_causal: bool = False
) -> torch.Tensor:
    """The latents by transformers' model: every pass computes its context again, under a mask.

    With `is_causal` the latents do not see those after them: another program, for controls.
    """
    states, all_times = latents, times(steps)
    for now, after in pairwise(all_times):
        embeds = node.weights.embeds(states, now)
        free, text = (
            _states(node, context, embeds, is_causal=is_causal) @ node.weights.out
            for context in (ids[:1], ids)
        )
        states = states - (free + SCALE * (text - free)) * (now - after)
    return states


def _states(node: FlowNode, ids: list[int], embeds: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    body = node.model.model
    known, count = len(ids), len(embeds)
    both = torch.cat([body.embed_tokens(torch.tensor(ids)), embeds])
    visible = torch.ones(known + count, known + count).tril().bool()
    if not is_causal:
        visible[known:, known:] = True
    mask = torch.zeros(()).where(visible, float("-inf"))[None, None]
    positions = torch.tensor([*range(known), *([known] * count)])[None]
    hidden: torch.Tensor = body(
        inputs_embeds=both[None], attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state[0]
    return hidden[known:]


def values(output: Any) -> torch.Tensor:
    """The latents in an output of the engine."""
    array = output.values["latents"]
    return torch.from_numpy(array.data.view(np.float32).reshape(array.shape).copy())
