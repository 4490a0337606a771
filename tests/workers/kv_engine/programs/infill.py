"""The program of the family `tests.tiny.infilling` in an engine, and a naive oracle of it."""

from typing import Any, Final

from models.programs import TokenRequest
from models.sequence_request import SamplingParams
from tests.tiny.infilling.nodes import JUDGE, InfillLM, infill
from tests.workers.cpu_kernels import models
from tests.workers.kv_engine.programs.pass_oracle import PassOracle, tokens_by
from workers.kv_engine.sequence_spec import SequenceSpec

WAYS: Final = ("plain", "keep", "crop", "guided", "judged")


def infill_node() -> InfillLM:
    """The node, with the same weights at each call."""
    return InfillLM(models.node(), models.node("llama"))


def spec(key: str, prompt: list[int], way: str = "plain", **options: Any) -> SequenceSpec:
    """A sequence of the program."""
    settings = {"max_tokens": 12, **options}
    return SequenceSpec(key=key, prompt_ids=prompt, token_program="infill", options={"way": way}, **settings)


def expected(node: InfillLM, asked: SequenceSpec) -> list[int]:
    """The tokens by the oracle, without those after the end of the answer."""
    request = TokenRequest(
        prompt_ids=asked.prompt_ids,
        prefix_ids=asked.prefix_ids,
        max_tokens=asked.max_tokens,
        end_ids=asked.end_ids,
        sampling=SamplingParams(),
        options=asked.options,
        seed=0,
        choice=0,
    )
    oracle = PassOracle({"": node.model, JUDGE: node.towers[JUDGE].model})
    found = tokens_by(oracle, infill(node, request), ends=lambda ids: not asked.end_ids.isdisjoint(ids))
    count = next((n for n, one in enumerate(found, 1) if one in asked.end_ids), asked.max_tokens)
    return found[: min(count, asked.max_tokens)]
