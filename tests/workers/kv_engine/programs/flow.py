"""The program of the family `tests.tiny.flowing` in an engine, and a naive oracle of it."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tests.tiny.flowing.nodes import CHANNELS, SCALE, FlowLM, times
from tests.workers.cpu_kernels import models
from workers.data_plane.arrays import to_array
from workers.data_plane.port import Array
from workers.kv_engine.programs.spec import ProgramSpec


def flow_node(**changes: Any) -> FlowLM:
    """A small Qwen3 with the program, with the same weights at each call."""
    return FlowLM(models.node(**changes))


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
    node: FlowLM, ids: list[int], latents: torch.Tensor, *, steps: int = 4, is_causal: bool = False
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


def _states(node: FlowLM, ids: list[int], embeds: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
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
