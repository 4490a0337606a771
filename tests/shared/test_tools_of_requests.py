"""The checks of a request's tools."""

import json
from typing import Any

import msgspec
import pytest

from shared.events import Inputs, MalformedEventError, NamedTool, RequestSubmitted, decode, submission_digest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def submitted(**inputs: Any) -> RequestSubmitted:
    request = {"model": "m", "inputs": {"text": "x", **inputs}}
    event = decode(json.dumps(request).encode(), "request")
    assert isinstance(event, RequestSubmitted)
    return event


def test_a_request_without_tools_is_the_one_it_always_was() -> None:
    assert submission_digest(submitted()) == "e123d08e2c273a76d283c72a9a03627e"
    assert submission_digest(submitted(tools=[], tool_choice="auto")) == submission_digest(submitted())


def test_tools_make_another_request_and_what_says_the_same_the_same() -> None:
    plain = {"type": "function", "function": {**TOOL["function"], "strict": False}}  # type: ignore[dict-item]
    digests = [
        submission_digest(submitted(**change))
        for change in (
            {"tools": [TOOL]},
            {"tools": [plain]},
            {"tools": [TOOL], "tool_choice": "required"},
            {},
        )
    ]

    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_choice_may_name_a_function() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    choice = submitted(tools=[TOOL], tool_choice=named).inputs.tool_choice

    assert isinstance(choice, NamedTool)
    assert choice.function.name == "f"


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ({"tools": [{**TOOL, "returns": "x"}]}, "returns"),
        ({"tools": [TOOL, TOOL]}, "tools: expected each function once, found 'f' twice"),
        ({"tools": [TOOL], "chat": False}, "tools: expected a chat"),
        ({"tools": [TOOL] * 129}, "Expected `array` of length <= 128"),
        ({"tool_choice": "required"},
         "tool_choice: expected 'auto' or 'none', because the request has no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice: expected one of the functions f, found 'g'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
         "parameters: expected a schema of the type 'object', found 5"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 140_000}}]},
         "tools: expected at most 131072 bytes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_no_request(inputs: dict[str, Any], why: str) -> None:
    with pytest.raises(MalformedEventError) as caught:
        submitted(**inputs)

    assert why in str(caught.value)


def test_text_that_is_none_is_refused_in_words() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "\ud800"}}]
    with pytest.raises(msgspec.ValidationError, match="tools: expected valid Unicode"):
        msgspec.convert({"text": "x", "tools": tools}, Inputs)
