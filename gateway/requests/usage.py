"""Token usage of an answer: summed over its choices, and as the JSON object that OpenAI defines."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shared.events import PARALLEL_TOKENS, Usage


@dataclass(slots=True)
class UsageTally:
    """The usage of an answer with `n` choices per prompt: a prompt counts once, the tokens of all choices."""

    n: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, choice: int, usage: Usage) -> None:
        """Add the usage of a choice that has ended."""
        if choice % self.n == 0:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens
        self.reasoning_tokens += usage.reasoning_tokens
        self.counts.update(usage.counts)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=self.reasoning_tokens,
            counts=dict(self.counts),
        )


def usage_object(usage: Usage, *, is_openais: bool = False) -> dict[str, Any]:
    """Usage as OpenAI's `usage` object, with the model's `counts` if it has any.

    The cached tokens are a part of it only where `is_openais`: a repeated answer of our own routes is the
    same to the byte.
    """
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens and is_openais:
        found["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return {**found, "counts": usage.counts} if usage.counts else found


def input_output_usage(usage: Usage) -> dict[str, Any]:
    """Usage as OpenAI's newer routes write it: of responses, and of batches."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def parallel_tokens(usage: Usage) -> dict[str, int]:
    """The field of dfastllm's answers with the tokens decoded in parallel, for models that do so."""
    found = usage.counts.get(PARALLEL_TOKENS)
    return {} if found is None else {"parallel_tokens_decoded": found}
