"""The model and the tokens that the answer to a line names, whichever endpoint gave it. Pure."""

from dataclasses import dataclass
from typing import Final

import msgspec

from shared.events import Usage


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """The `usage` of chats, completions and embeddings, or that of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    model: str = ""
    usage: _Usage | None = None


_NO_DETAILS: Final = _Details()


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """The model of an answer, empty if it names none, and its tokens."""

    model: str
    usage: Usage


def answer_usage(body: bytes) -> AnswerUsage:
    """Read the JSON of an answer. One that counts no tokens has used none."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except msgspec.MsgspecError:
        return AnswerUsage("", Usage())
    found = answer.usage or _Usage()
    given = found.prompt_tokens_details or found.input_tokens_details or _NO_DETAILS
    written = found.completion_tokens_details or found.output_tokens_details or _NO_DETAILS
    usage = Usage(
        prompt_tokens=found.prompt_tokens or found.input_tokens,
        completion_tokens=found.completion_tokens or found.output_tokens,
        cached_tokens=given.cached_tokens,
        reasoning_tokens=written.reasoning_tokens,
    )
    return AnswerUsage(answer.model, usage)
