"""The masks and positions of passes, against one forward of transformers under the same mask."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from models.programs import Mask, Pass
from tests.tiny.flowing.nodes import FlowLM
from tests.workers.cpu_kernels.libraries import NAMES, library
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.flow import flow_node
from workers.cpu_kernels.decoder import NativeDecoder
from workers.kv_engine.outputs import ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec

KNOWN = 13
"""Tokens of the context before the pass."""


class Once:
    """A driver: a context of `KNOWN` tokens, one pass behind it, and, if it commits, a token after that."""

    max_contexts = 1
    max_tokens = 64

    def __init__(self, asked: Pass, results: list[torch.Tensor]) -> None:
        self._rounds = [Pass(context="c", ids=range(1, KNOWN + 1), commits=True), asked]
        if asked.commits:
            self._rounds.append(Pass(context="c", ids=[7]))
        self._results = results

    def passes(self) -> Sequence[Pass]:
        return [self._rounds.pop(0)]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        self._results += [states.float() for states in hidden]
        return None if self._rounds else {"done": torch.ones(1)}


def computed(asked: Pass, *, native: bool) -> list[torch.Tensor]:
    """The states of each round."""
    node: Any = flow_node()
    results: list[torch.Tensor] = []
    node.programs["once"] = lambda *_, **__: Once(asked, results)
    if native:
        node = NativeDecoder(node, library(NAMES[-1]), threads=1)
    engine = make_engine(node, num_blocks=20, block_size=8, max_step_tokens=16, max_sequences=2)
    engine.add_program(ProgramSpec(key="0", program="once", inputs={}, args={}, seed=0))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [type(output) for output in outputs] == [ProgramOutput]
    return results


@torch.inference_mode()
def expected(node: FlowLM, ids: list[int], positions: list[int], visible: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(()).where(visible, float("-inf"))[None, None]
    hidden: torch.Tensor = node.model.model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("mask", "frame_tokens", "positions"),
    [(Mask.CAUSAL, 0, None), (Mask.FULL, 0, 20), (Mask.FULL, 0, torch.arange(6) * 2), (Mask.FRAMES, 3, None)],
)
def test_tokens_see_what_the_mask_says(mask: Mask, frame_tokens: int, positions: Any, native: bool) -> None:
    ids = [101, 102, 103, 104, 105, 106]
    asked = Pass(
        context="c", ids=ids, mask=mask, frame_tokens=frame_tokens, positions=positions, commits=True
    )
    total = KNOWN + len(ids)
    visible = torch.ones(total + 1, total + 1).tril().bool()
    width = {Mask.CAUSAL: 1, Mask.FULL: len(ids), Mask.FRAMES: frame_tokens}[mask]
    for start in range(KNOWN, total, width):
        visible[start : start + width, start : start + width] = True
    if positions is None:
        own = list(range(KNOWN, total))
    else:
        own = positions.tolist() if isinstance(positions, torch.Tensor) else [positions] * len(ids)
    following = max(own) + 1

    found = torch.cat(computed(asked, native=native))

    everything = [*range(1, KNOWN + 1), *ids, 7]
    wanted = expected(flow_node(), everything, [*range(KNOWN), *own, following], visible)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
