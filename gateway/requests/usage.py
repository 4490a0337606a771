"""Token usage of an answer: summed over its choices, and as the JSON object that OpenAI defines."""

from dataclasses import dataclass

from shared.events import Usage


@dataclass(slots=True)
class UsageTally:
    """The usage of an answer with `n` choices per prompt: a prompt counts once, the tokens of all choices."""

    n: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, choice: int, usage: Usage) -> None:
        """Add the usage of a choice that has ended."""
        if choice % self.n == 0:
            self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


def usage_object(usage: Usage) -> dict[str, int]:
    """Usage as OpenAI's `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
