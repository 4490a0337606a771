"""The plan: its partitions, the ends of its streams, and the arguments of its walks."""

from typing import Any

import pytest

from models.base import EngineKind
from models.orpheus.graph import GRAPH
from shared.errors import ClientError
from shared.events import Inputs, Limits, Params, Usage, WalkResult
from shared.plan_run import PendingStep, PlanRun
from shared.plans import Finish, PlanRequest, StepResult
from shared.tensors import inline_ids
from shared.walks.chunks import SlidingWindow
from shared.walks.linker import link_streams

PROMPT = inline_ids("p", [128259, 5, 128257])
SAMPLING = {"temperature": 0.6, "top_p": 0.8, "top_k": 0, "repetition_penalty": 1.3}


def journey(*, max_seq_len: int = 4096, kv_tokens: int = 9000, default: int = 2048, **params: Any) -> PlanRun:
    limits = Limits(max_seq_len=max_seq_len, kv_tokens=kv_tokens, default_max_tokens=default)
    inputs = Inputs(text="hi", output_modalities=["audio"])
    return PlanRun(
        GRAPH, PlanRequest(request_id="r", inputs=inputs, params=Params(**params), limits=limits, seed=1)
    )


def prepared(prompt_tokens: int = 3) -> StepResult:
    facts = {"prompt_tokens": prompt_tokens, "sampling": SAMPLING}
    return StepResult((WalkResult(name="prepare", facts=facts, outputs={"token_ids": PROMPT}),))


TOLD = StepResult(
    (
        WalkResult(name="prefill", facts={}),
        WalkResult(name="decode", facts={"completion_tokens": 44, "finish_reason": "stop"}),
    )
)
SPOKEN = StepResult((WalkResult(name="snac_chunk", facts={}),))


def at_hand(found: tuple[PendingStep, ...] | Finish) -> dict[str, PendingStep]:
    assert not isinstance(found, Finish)
    return {step.partition: step for step in found}


def test_the_language_model_and_snac_run_at_the_same_time() -> None:
    [first] = at_hand(journey().advance([])).values()
    found = at_hand(journey().advance([(0, prepared())]))

    assert [walk.name for walk in first.walks] == ["prepare"]
    assert {name: [walk.name for walk in step.walks] for name, step in found.items()} == {
        "": ["prefill", "decode"],
        "speech": ["snac_chunk"],
    }
    assert (found[""].ends, found["speech"].ends) == (("token",), ())
    assert found[""].walks[0].inputs == {"token_ids": PROMPT}


@pytest.mark.parametrize("order", [("", "speech"), ("speech", "")])
def test_the_plan_finishes_after_both_partitions_in_either_order(order: tuple[str, str]) -> None:
    asked = journey()
    steps = at_hand(asked.advance([(0, prepared())]))
    came = {"": TOLD, "speech": SPOKEN}
    results = [(0, prepared())]
    for partition in order:
        assert not isinstance(asked.advance(results), Finish)
        results.append((steps[partition].index, came[partition]))

    assert asked.advance(results) == Finish(
        usage=Usage(prompt_tokens=3, completion_tokens=44), finish_reasons=("stop",)
    )


@pytest.mark.parametrize(
    ("limits", "params", "expected"),
    [
        ({}, {}, 1200),
        ({}, {"max_tokens": 3000}, 3000),
        ({"default": 70}, {}, 70),
        ({"max_seq_len": 100}, {}, 97),
        ({"kv_tokens": 50}, {}, 47),
    ],
)
def test_the_limit_of_new_tokens(limits: dict[str, int], params: dict[str, Any], expected: int) -> None:
    step = at_hand(journey(**limits, **params).advance([(0, prepared())]))[""]

    assert [walk.call().args["max_tokens"] for walk in step.walks] == [expected, expected]


def test_more_than_the_context_holds_is_refused() -> None:
    with pytest.raises(ClientError, match="context length is 100 tokens, but 203"):
        journey(max_seq_len=100, max_tokens=200).advance([(0, prepared())])


def test_optional_arguments_are_given_to_prefill_only() -> None:
    asked = journey(ignore_eos=True, stop_token_ids=[7], choice=2)
    prefill, decode = at_hand(asked.advance([(0, prepared())]))[""].walks

    args = {"max_tokens": 1200, "sampling": SAMPLING, "ignore_eos": True}
    assert decode.call().args == args
    assert prefill.call().args == {**args, "stop_token_ids": [7], "choice": 2}


def test_names_are_those_of_published_placements() -> None:
    assert GRAPH.nodes == {
        "prepare": EngineKind.CPU,
        "LLM": EngineKind.KV,
        "snac_decoder": EngineKind.STATELESS,
    }
    assert {"prefill", "decode", "snac_chunk"} < set(GRAPH.walks)
    assert GRAPH.former_walks == {"decode_llm", "audio_gen"}
    assert not GRAPH.former_walks & set(GRAPH.walks)


def test_snac_is_the_only_output_node_at_24_khz() -> None:
    assert GRAPH.outputs == ("audio",)
    assert GRAPH.tracks == {"snac_decoder": ""}
    assert GRAPH.media == {"audio": {"sample_rate": 24000, "num_channels": 1, "format": "pcm_s16le"}}


def test_prefill_and_decode_feed_one_stream_of_audio_tokens() -> None:
    [info] = link_streams(GRAPH.walks).values()

    assert info.policy == SlidingWindow(28, 7)
    assert info.only == (128266, 128266 + 7 * 4096)
    assert info.producers == (("prefill", "LLM"), ("decode", "LLM"))
    assert info.consumer_walk == "snac_chunk"
