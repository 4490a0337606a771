"""vLLM's additions to OpenAI's answers: the ids of the tokens, and the counts so far of a stream.

    return_token_ids                        `prompt_token_ids` once, `token_ids` with each piece of a choice
    stream_options.continuous_usage_stats   `usage` with each event

Both need the ids of the prompt, which the log has as chunks of an echo before the answer (`Params.echo`).
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from gateway.requests.usage import usage_object
from shared.events import OutputChunk, Usage


class StreamUsage(Enum):
    """The events of a stream that have a usage: none, the last one, or each one, of its choice so far."""

    NONE = auto()
    LAST = auto()
    ALL = auto()


def ids_of(chunk: OutputChunk) -> list[int]:
    """The ids of a chunk: of the prompt, if it is one of an echo."""
    return list(chunk.metadata.get("token_ids", ())) if chunk.is_echo else chunk.token_ids


@dataclass(slots=True)
class ChoiceTokens:
    """The ids of one choice so far: of its prompt, and of its answer."""

    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def add(self, chunk: OutputChunk) -> None:
        """Take the next chunk."""
        ids = self.prompt if chunk.is_echo else self.answer
        ids += ids_of(chunk)

    def usage(self) -> dict[str, Any]:
        """Their counts."""
        return usage_object(Usage(prompt_tokens=len(self.prompt), completion_tokens=len(self.answer)))
