"""The requests: every kind of stream a client may have, each long enough to be interrupted in its middle.

All are greedy or seeded, so that an answer can be compared with that of an undisturbed run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

Way: TypeAlias = Literal[
    "/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "client", "nats"
]
MODEL: Final = "chaos"
TOKENS: Final = 120
_SEEDED: Final[dict[str, Any]] = {"temperature": 1.0, "seed": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, to be sent any number of times under different ids.

    Attributes:
        way: the route; or our own client, over HTTP or over NATS.
        fields: the fields of the body, or the client's arguments.
        choices: the number of choices.
        is_whole: the answer comes as one document, not as a stream.
        leaves_after: the number of pieces after which the client disconnects for good; None never.
        cancels_after: the number of pieces after which the client cancels the request.
        fails_with: the code of the error that it has to end with.
    """

    name: str
    way: Way
    fields: Mapping[str, Any] = field(default_factory=dict)
    choices: int = 1
    is_whole: bool = False
    leaves_after: int | None = None
    cancels_after: int | None = None
    fails_with: str = ""


def _chat(text: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": text}],
    }


GREEDY: Final = Question(
    name="greedy",
    way="/generate",
    fields={
        "text": "Tell me of a wizard.",
        "model_kwargs": {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True},
    },
)
SEEDED: Final = Question(
    name="seeded",
    way="/generate",
    fields={
        "text": "Tell me of a king.",
        "model_kwargs": {**_SEEDED, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2},
    },
)
TWO: Final = Question(
    name="two",
    way="/v1/chat/completions",
    fields={
        **_chat("Tell me of two sisters."),
        **_SEEDED,
        "n": 2,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "frequency_penalty": 0.7,
    },
    choices=2,
)
STOPPED: Final = Question(
    name="stopped",
    way="/v1/chat/completions",
    fields={
        **_chat("Tell me of a ship."),
        **_SEEDED,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "repetition_penalty": 1.2,
    },
)
"""Without its stop string, which is a piece of what is answered (`stopping_at`)."""
LISTED: Final = Question(
    name="listed",
    way="/v1/completions",
    fields={
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": "Once upon a time",
        **_SEEDED,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": 1,
    },
)
PLAIN: Final = Question(
    name="plain",
    way="nats",
    fields={"text": "Tell me of the sea.", **_SEEDED, "max_tokens": TOKENS, "ignore_eos": True},
)
OURS: Final = Question(
    name="ours",
    way="client",
    fields={"text": "Tell me of the moon.", **_SEEDED, "max_tokens": TOKENS, "ignore_eos": True},
)
LEAVER: Final = Question(
    name="leaver",
    way="/generate",
    fields={
        "text": "Tell me more than I can hear.",
        "model_kwargs": {"temperature": 0, "max_tokens": 3 * TOKENS, "ignore_eos": True},
    },
    leaves_after=2,
)
CANCELLED: Final = Question(
    name="cancelled",
    way="/generate",
    fields={
        "text": "Tell me until I stop you.",
        "model_kwargs": {"temperature": 0, "max_tokens": 3 * TOKENS, "ignore_eos": True},
    },
    cancels_after=3,
    fails_with="request_cancelled",
)
_WEATHER: Final = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rom"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def _whole(name: str, way: Way, choices: int = 1, **fields: Any) -> Question:
    return Question(name=name, way=way, fields={"model": MODEL, **fields}, choices=choices, is_whole=True)


WHOLE: Final = (
    _whole(
        "whole-chat",
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Tell me of a fox."}],
        max_tokens=TOKENS,
        ignore_eos=True,
        **_SEEDED,
    ),
    _whole(
        "whole-completions",
        "/v1/completions",
        choices=2,
        prompt=["Once", "Twice upon a time"],
        max_tokens=TOKENS,
        ignore_eos=True,
        **_SEEDED,
    ),
    _whole(
        "guided",
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Is it warm?"}],
        max_tokens=TOKENS,
        response_format={"type": "json_schema", "json_schema": {"name": "weather", "schema": _WEATHER}},
        **_SEEDED,
    ),
    _whole(
        "tools",
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Is it warm?"}],
        max_tokens=TOKENS,
        tools=[{"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}],
        tool_choice="required",
        parallel_tool_calls=False,
        **_SEEDED,
    ),
    _whole("embedded", "/v1/embeddings", choices=2, input=["the sea", "the moon"]),
)
"""Answers that come as one document: a client that lost its connection sends the same request again."""
SPOKEN: Final = tuple(
    Question(
        name=f"spoken-{number}",
        way="/generate",
        fields={
            "text": text,
            "model_kwargs": {"voice": "zoe", "seed": 7, "max_tokens": 400, "ignore_eos": True},
        },
    )
    for number, text in enumerate(("what?", "one two three"))
)
"""What a model that speaks is asked."""
LASTING: Final = (GREEDY, SEEDED, TWO, STOPPED, LISTED, OURS, PLAIN)
"""What every round asks."""


def stopping_at(text: str) -> Question:
    """`STOPPED` with a stop string that ends `text`, its answer without one, after its middle.

    Raises:
        ValueError: every possible stop string occurs too early.
    """
    for at in range(len(text) // 2, len(text) - 6):
        stop = text[at : at + 6]
        if text.find(stop) == at and stop.isprintable():
            return replace(STOPPED, fields={**STOPPED.fields, "stop": [stop]})
    raise ValueError(f"expected a text with something new in its second half, found {text!r}")
