"""BAGEL's plan: its walks, the requests that it refuses before anything is computed, and what it counts."""

from typing import Any

import msgspec
import pytest

from models.bagel.graph import GRAPH, BagelPrompt
from models.bagel.spans import BRANCHES, Kind, Span
from models.bagel.walks import CFG_NODES, WALKS
from models.sequence_request import SamplingParams
from shared.errors import ClientError
from shared.events import Guide, Inputs, Limits, Params, WalkResult
from shared.plans import Finish, PlanRequest, StepResult, Walk
from shared.tensors import Handle
from shared.walks import WalkRun

DRAW = [Span(Kind.SYSTEM, 3), Span(Kind.TEXT, 5)]
EDIT = [Span(Kind.VAE, 6, "a"), Span(Kind.VIT, 5, "b"), Span(Kind.TEXT, 4)]
SPREAD: dict[str, Any] = {"absent_nodes": ()}
HANDLE = Handle(key="k", dtype="int32", shape=(1,))


def request(
    *outputs: str, params: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **limits: Any
) -> PlanRequest:
    known: dict[str, Any] = {
        "max_seq_len": 4096,
        "kv_tokens": 4096,
        "default_max_tokens": 8,
        "absent_nodes": CFG_NODES,
    }
    return PlanRequest(
        request_id="r",
        inputs=Inputs(text="a cat", output_modalities=list(outputs)),
        params=Params(options=options or {}, **(params or {})),
        limits=Limits(**(known | limits)),
        seed=1,
    )


def prepared(spans: list[Span]) -> StepResult:
    """The result of `prepare` for an image of 2 x 3 latents behind a prompt."""
    facts = BagelPrompt(
        prompt_tokens=sum(span.tokens for span in spans),
        sampling=SamplingParams(),
        spans=spans,
        width=48,
        height=32,
    )
    names = ("token_ids", "pixels", "vae_pixels", "latents", "time_index")
    outputs = dict.fromkeys(names, HANDLE)
    return StepResult((WalkResult(name="prepare", facts=msgspec.to_builtins(facts), outputs=outputs),))


def first_walk(asked: PlanRequest, spans: list[Span]) -> Walk:
    """The walk that follows `prepare`."""
    plan = GRAPH.plan(asked)
    next(plan)
    step = plan.send(prepared(spans))
    assert isinstance(step, Walk)
    return step


def drawn(asked: PlanRequest, spans: list[Span]) -> Finish:
    plan = GRAPH.plan(asked)
    next(plan)
    plan.send(prepared(spans))
    result = WalkResult(name="image_gen", facts={"counts": {"forwards": 90}}, outputs={})
    with pytest.raises(StopIteration) as ended:
        plan.send(StepResult((result,)))
    assert isinstance(ended.value.value, Finish)
    return ended.value.value


def test_the_usage_counts_the_tokens_of_images() -> None:
    assert drawn(request("image"), EDIT).usage.counts == {"forwards": 90, "image_tokens": 11}
    assert drawn(request("image"), DRAW).usage.counts == {"forwards": 90}


@pytest.mark.parametrize(
    ("name", "params"), [("response_format", {"guide": Guide(regex="a")}), ("logprobs", {"logprobs": 1})]
)
def test_an_image_alone_takes_no_option_of_texts(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ClientError, match=f"{name}: the answer is an image without a text"):
        next(GRAPH.plan(request("image", params=params)))
    for outputs, options in ((("text", "image"), {}), (("image",), {"think_mode": True})):
        next(GRAPH.plan(request(*outputs, params=params, options=options)))


def test_a_begun_answer_is_not_continued() -> None:
    asked = request("text")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    begun = msgspec.structs.replace(asked.inputs, text=None, messages=messages, continue_final_message=True)

    with pytest.raises(ClientError, match="continue_final_message: this model has no chat template"):
        next(GRAPH.plan(msgspec.structs.replace(asked, inputs=begun)))


def test_three_ranks_need_the_room_of_the_largest_branch() -> None:
    # Alone: both prompts, of which the first 3 tokens are shared, and twice 6 latents between 2 brackets.
    assert first_walk(request("image", kv_tokens=8 + 16), DRAW).name == "image_gen"
    with pytest.raises(ClientError, match="needs 24 tokens of the KV cache, which has 23"):
        first_walk(request("image", kv_tokens=23), DRAW)
    assert first_walk(request("image", kv_tokens=16, **SPREAD), DRAW).name == "image_gen_cfg"
    with pytest.raises(ClientError, match="needs 16 tokens of the KV cache, which has 15"):
        first_walk(request("image", kv_tokens=15, **SPREAD), DRAW)


def test_branches_with_equal_prompts_need_room_once() -> None:
    options = {"cfg_img_scale": 2.0}  # without images, its texts are the whole prompt
    assert first_walk(request("image", options=options, kv_tokens=24), DRAW).name == "image_gen"


def test_a_thought_that_does_not_fit_is_named() -> None:
    asked = request("image", params={"max_tokens": 4090}, options={"think_mode": True})
    with pytest.raises(ClientError, match=r"a text of 4090 tokens needs .*, or set a smaller max_tokens"):
        first_walk(asked, DRAW)


def test_the_branches_take_room_one_after_the_other_and_compute_at_once() -> None:
    walk = WALKS["image_gen_cfg"]
    run = WalkRun(walk, {"iterations": 3})
    run.start(dict.fromkeys(walk.consumers, 0))
    ready: list[list[str]] = []
    while firings := run.take_ready():
        ready.append([one.node for one in firings])
        for firing in firings:
            run.complete(firing, dict.fromkeys(walk.nodes[firing.node].outputs, 0))
    step = [[*BRANCHES], ["combine_cfg"]]
    in_order = [[one] for one in (*BRANCHES, "combine_cfg")]
    assert ready == [
        ["vae_encoder"],
        ["vit_encoder"],
        *in_order,
        *step,
        *step,
        ["vae_decoder"],
        ["encode_image"],
    ]
