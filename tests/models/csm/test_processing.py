"""Prompts are as published, and what cannot be spoken is refused before anything is computed."""

from typing import Any

import msgspec
import pytest

from models.csm import graph, processing
from models.sequence_request import PreparedPrompt, PrepareRequest
from shared.errors import BugError, ClientError
from shared.events import Inputs, Params
from shared.tensors import read_ids
from shared.walks import CompiledWalk
from tests.models.csm import serving
from tests.tiny.csm import tiny_csm

_AUDIO = {"output_modalities": ["audio"]}


def prepare(inputs: dict[str, Any], **params: Any) -> Any:
    args = PrepareRequest(inputs=Inputs(**{**_AUDIO, **inputs}), params=Params(**params))
    return serving.prepares().run("prepare", "k", {}, msgspec.to_builtins(args))


@pytest.mark.parametrize(("voice", "speaker"), [(None, "0"), ("0", "0"), ("4", "4")])
def test_a_text_is_wrapped_as_published(voice: str | None, speaker: str) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415 - only here

    result = prepare({"text": "hello"}, voice=voice)
    tokenizer = Tokenizer.from_file(str(tiny_csm() / "tokenizer.json"))
    ids = read_ids(result.handle("token_ids"))
    assert list(ids) == tokenizer.encode(f"[{speaker}]hello").ids
    facts = msgspec.convert(result.facts, PreparedPrompt)
    assert (facts.prompt_tokens, facts.sampling.temperature, facts.sampling.top_k) == (len(ids), 0.9, 50)


@pytest.mark.parametrize(
    ("inputs", "params", "message"),
    [
        ({"text": "hello"}, {"voice": "tara"}, "voice: expected one of 0, 1, 2"),
        ({"text": "hello"}, {"voice": "10"}, "voice: expected one of 0, 1, 2"),
        ({"text": " "}, {}, "the text is empty"),
        ({"messages": [{"role": "user", "content": "hi"}]}, {}, "takes no messages"),
        ({"text": "hello", "output_modalities": ["text"]}, {}, "this model speaks"),
        ({"text": "hello"}, {"stop": ["x"]}, "stop is a parameter of text output"),
        ({"text": "hello " * 300}, {}, "256"),
    ],
)
def test_what_cannot_be_spoken_is_refused(
    inputs: dict[str, Any], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClientError, match=message):
        prepare(inputs, **params)


def test_it_has_one_cpu_node_and_declares_its_voices() -> None:
    with pytest.raises(BugError, match="has no CPU node"):
        serving.prepares().run("speak", "k", {}, {})
    assert graph.GRAPH.voices == tuple("0123456789")
    assert all(isinstance(walk, CompiledWalk) for walk in graph.GRAPH.walks.values())
    assert isinstance(serving.prepares(), processing.CsmProcessing)
    assert serving.prepares().text_decoder().push(3) == ""
