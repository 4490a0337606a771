"""The typed arguments and facts keep their form on the wire: orders and facts of old logs decode."""

from typing import Any

import msgspec
import pytest

from models.sequence_request import (
    PoolingParams,
    PreparedPrompt,
    PrepareRequest,
    SamplingParams,
    SequenceFacts,
    SequenceRequest,
    changed,
    samples_tokens,
)
from shared.errors import BugError, ClientError
from shared.events import Guide, Inputs, Params, WalkCall
from shared.plans import Walk

SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
ORDERS: list[dict[str, Any]] = [
    {"max_tokens": 4, "sampling": SAMPLING, "stop": [], "ignore_eos": False},
    {"max_tokens": 1200, "sampling": {**SAMPLING, "repetition_penalty": 1.3}, "ignore_eos": True},
    {
        "max_tokens": 4,
        "sampling": {
            "temperature": 1.0,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "logit_bias": [[7, 2.0]],
            "bad_words": [[1, 2], [3]],
            "min_tokens": 2,
        },
        "stop": ["x"],
        "ignore_eos": False,
        "stop_token_ids": [5],
        "choice": 2,
        "logprobs": 0,
        "guide": {"regex": "a+"},
        "exhausts_guide": True,
        "echo": "hi",
    },
    {"pooling": {"mode": "lasttoken", "normalize": False, "dimensions": 8}},
    {"pooling": {"mode": "none"}},
    {"warm": True},
]


@pytest.mark.parametrize("args", ORDERS)
def test_a_recorded_order_decodes_and_encodes_to_the_same_bytes(args: dict[str, Any]) -> None:
    request = SequenceRequest.of(WalkCall(name="prefill", args=args))

    again = Walk("prefill", args=request).call().args
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(args)


@pytest.mark.parametrize(
    "facts",
    [
        {"prompt_tokens": 3, "sampling": SAMPLING},
        {"prompt_tokens": 3, "sampling": SAMPLING, "prompt_text": ""},
        {"prompt_tokens": 3, "sampling": SAMPLING, "pooling": {"mode": "none"}},
        {"prompt_tokens": 3, "sampling": SAMPLING, "guide": None},
        {"prompt_tokens": 3, "sampling": SAMPLING, "guide": {"grammar": "start: /a/"}},
    ],
)
def test_recorded_facts_of_a_prompt_decode_and_encode_to_the_same_bytes(facts: dict[str, Any]) -> None:
    prepared = msgspec.convert(facts, PreparedPrompt)

    assert msgspec.msgpack.encode(prepared) == msgspec.msgpack.encode(facts)


def test_the_values_are_typed() -> None:
    request = SequenceRequest.of(WalkCall(name="prefill", args=ORDERS[2]))

    assert request.sampling is not None
    assert request.sampling.logit_bias == [(7, 2.0)]
    assert request.guide == Guide(regex="a+")
    pooled = SequenceRequest.of(WalkCall(name="score", args=ORDERS[3]))
    assert pooled.pooling == PoolingParams(mode="lasttoken", normalize=False, dimensions=8)


def test_arguments_of_other_nodes_of_the_walk_are_ignored() -> None:
    call = WalkCall(name="prefill", args={"max_tokens": 1, "steps": 4})

    assert SequenceRequest.of(call) == SequenceRequest(max_tokens=1)


@pytest.mark.parametrize("args", [{"max_tokens": "4"}, {"sampling": {"temprature": 1.0}}, {"choice": None}])
def test_arguments_of_a_wrong_type_or_name_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(BugError, match="walk 'prefill': expected arguments for a sequence: "):
        SequenceRequest.of(WalkCall(name="prefill", args=args))


def test_the_number_of_cached_tokens_is_a_fact_of_warm_requests_alone() -> None:
    plain = SequenceFacts(completion_tokens=4, finish_reason="stop")
    warm = SequenceFacts(completion_tokens=0, finish_reason="length", cached_tokens=0)

    assert msgspec.to_builtins(plain) == {"completion_tokens": 4, "finish_reason": "stop"}
    assert msgspec.to_builtins(warm)["cached_tokens"] == 0


def test_a_request_to_prepare_is_decoded_or_refused_by_name() -> None:
    request = PrepareRequest(inputs=Inputs(text="hi"), params=Params(top_k=1))

    assert PrepareRequest.of(Walk("prepare", args=request).call().args) == request
    with pytest.raises(ClientError, match=r"the request is malformed: .*params"):
        PrepareRequest.of({"inputs": {"text": "hi"}, "params": {"top_k": "1"}})


def test_sampling_parameters_without_an_effect_are_absent() -> None:
    assert msgspec.to_builtins(SamplingParams(temperature=0.0, top_p=1.0, top_k=0)) == SAMPLING


def test_a_changed_request_keeps_arguments_for_other_nodes() -> None:
    call = WalkCall(
        name="prefill", args={"max_tokens": 4, "sampling": SAMPLING, "echo": "Once", "voices": {"a": 1}}
    )
    assert samples_tokens(call)
    found = changed(call, echo=None, max_tokens=2, logprobs=20)
    assert found.args == {"max_tokens": 2, "sampling": SAMPLING, "logprobs": 20, "voices": {"a": 1}}
    assert changed(call) == call
    assert not samples_tokens(WalkCall(name="prepare", args={"inputs": {}, "params": {}}))
