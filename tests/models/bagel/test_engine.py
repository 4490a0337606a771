"""BAGEL in the KV engine: texts with images and drawings in one batch over the pool, as published."""

from collections import defaultdict
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from models.bagel.drawing import FlowRequest
from models.bagel.llm import BagelLM
from models.bagel.nodes import load
from models.bagel.spans import parts_of
from tests.models.bagel import test_published as by_hand
from tests.models.bagel.cases import CASES, SEED, published
from tests.tiny.bagel import bagel_checkpoint
from tests.workers.kv_engine.engines import make_engine
from tests.workers.kv_engine.programs.flow import values
from workers.data_plane.arrays import to_array
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.outputs import TokenOutput
from workers.kv_engine.programs.spec import ProgramSpec
from workers.kv_engine.selfcheck import check_node
from workers.kv_engine.sequence_spec import SequenceSpec

SIZES: dict[str, Any] = {
    "num_blocks": 600,
    "block_size": 16,
    "max_step_tokens": 512,
    "max_sequences": 16,
    "max_pass_tokens": 2048,
}


def text(name: str) -> SequenceSpec:
    """A request for the text of a case, which begins behind the first token of each answer."""
    given = by_hand.prompt(CASES[name])
    ids = [*given.ids, by_hand.token_id(by_hand.BOS)]
    return SequenceSpec(
        key=name,
        prompt_ids=ids,
        max_tokens=len(published()[f"{name}.token_ids"]) - 1,
        parts=parts_of(given.spans, seed=SEED),
        embeds=to_array(given.rows) if len(given.rows) else None,
    )


def drawing(name: str) -> ProgramSpec:
    """A call of the flow of a case."""
    case = CASES[name]
    given = by_hand.prompt(case)
    height, width = case.options.get("image_shapes", (512, 512))
    asked = FlowRequest(spans=given.spans, flow=by_hand.settings(case), width=width, height=height)
    inputs = {
        "token_ids": to_array(torch.tensor(given.ids, dtype=torch.int32)),
        "embeds": to_array(given.rows),
    }
    return ProgramSpec(key=name, program="flow", inputs=inputs, args=msgspec.to_builtins(asked), seed=SEED)


@cache
def node(dtype: str = "float32") -> Any:
    """A node of its own: an engine changes the attention of its node."""
    found = load(bagel_checkpoint(), "LLM", dtype=dtype)
    assert isinstance(found, BagelLM)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pool_gives_what_the_model_does(dtype: str) -> None:
    node(dtype).use_attention(ATTENTION)
    check_node(node(dtype))


@torch.inference_mode()
def test_texts_and_drawings_in_one_batch_are_those_of_the_published_code() -> None:
    texts = ("text", "image_text")
    drawings = ("draw", "draw_plain", "draw_channel", "draw_text_channel", "edit")
    engine = make_engine(node(), **SIZES)
    for name in texts:
        engine.add(text(name))
    for name in drawings:
        engine.add_program(drawing(name))
    found = defaultdict[str, list[Any]](list)
    while engine.has_work:
        for one in engine.step():
            found[one.key].append(one)

    for name in texts:
        tokens = [one.token_id for one in found[name] if isinstance(one, TokenOutput)]
        assert tokens == published()[f"{name}.token_ids"][1:].tolist()
    errors = {name: by_hand.error(name, values(found[name][-1])) for name in drawings}
    assert errors == pytest.approx(dict.fromkeys(drawings, 0.0), abs=1e-3)
