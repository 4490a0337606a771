"""A node without a language head: it is checked by its states, and runs programs alone."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch

from models.base import TokenStep
from models.checkpoints.files import UnsupportedArchitectureError
from models.programs import Mask, Pass
from shared.errors import BugError
from tests.workers.cpu_kernels import models
from tests.workers.kv_engine.engines import make_engine
from workers.data_plane.arrays import to_array, to_tensor
from workers.kv_engine.outputs import ProgramOutput
from workers.kv_engine.programs.spec import ProgramSpec
from workers.kv_engine.sequence_spec import SequenceSpec

_OF_THE_MODEL: Final = (
    "name", "architecture", "layout", "kernels", "max_positions", "parameters", "device", "dtype",
    "use_attention", "weights_digest",
)  # fmt: skip


class Headless:
    """The layers of a language model, without its embeddings and its head."""

    masks = frozenset({"causal", "full"})

    def __init__(self, error: float = 0.0) -> None:
        self._node: Any = models.node()
        self._error = error
        self.embed_width = int(self._node.model.config.hidden_size)
        self.programs = {"states": lambda _, inputs, args, *, seed: States(inputs["rows"])}

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_THE_MODEL:
            raise AttributeError(name)
        return getattr(self._node, name)

    def forward(self, inputs: torch.Tensor, step: TokenStep) -> torch.Tensor:
        hidden: torch.Tensor = self._node.forward(inputs, step)
        return hidden

    def reference_states(self, rows: torch.Tensor) -> torch.Tensor:
        return stock(rows) * (1 + self._error)


class States:
    max_contexts = 1
    max_tokens = 8

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def passes(self) -> list[Pass]:
        return [Pass(context="a", embeds=self._rows, mask=Mask.CAUSAL)]

    def take(self, results: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"states": results[0]}


@torch.inference_mode()
def stock(rows: torch.Tensor) -> torch.Tensor:
    node: Any = models.node()
    found: torch.Tensor = node.model.model(inputs_embeds=rows[None]).last_hidden_state[0]
    return found


def make(node: Headless) -> Any:
    by: Any = node
    return make_engine(by, num_blocks=16, block_size=4, max_step_tokens=64, max_sequences=4)


def test_its_passes_bring_embeddings() -> None:
    by, rows = make(Headless()), torch.randn(5, Headless().embed_width)

    by.add_program(
        ProgramSpec(key="run", node="llm", program="states", inputs={"rows": to_array(rows)}, args={}, seed=0)
    )
    [output] = [one for _ in range(3) if by.has_work for one in by.step()]

    assert isinstance(output, ProgramOutput)
    found = to_tensor(output.values["states"], torch.device("cpu"))
    torch.testing.assert_close(found, stock(rows), atol=1e-3, rtol=1e-3)


def test_it_is_refused_if_its_states_differ_from_the_stock_models() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="differ from its own by"):
        make(Headless(error=0.5))


def test_it_has_no_sequences() -> None:
    with pytest.raises(BugError, match="has no language head: expected a walk with a program"):
        make(Headless()).add(SequenceSpec(key="text", prompt_ids=[1], max_tokens=1))
