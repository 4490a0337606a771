"""The choice of requests that `dalsegno log` lists. Pure.

Several values of one kind are alternatives; different kinds all apply. Texts are an exception: a prompt has
to contain all of them. `dalsegno.history.prompts` reads the prompts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dalsegno.history.summary import EVER_NS, Summary

_VALUES: Final[Mapping[str, Callable[[Summary], Iterable[object]]]] = {
    "outcome": lambda one: (one.outcome,),
    "code": lambda one: (one.code,),
    "tenant": lambda one: (one.tenant,),
    "model": lambda one: (one.model,),
    "rank": lambda one: one.ranks,
}
"""By kind of choice, what a request has of it."""
KINDS: Final = (*_VALUES, "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """A choice of requests.

    Attributes:
        chosen: by kind (`KINDS` without `text`), the values of which a request has to have one.
        excluded: the same, of which it has none.
        texts: the texts that its prompt has to contain; case and the form of white space do not matter.
        excluded_texts: those of which it contains none.
        since_ns: submitted then or later.
        until_ns: submitted before.
        slower_than_s: it took longer, or has been running for longer.
        faster_than_s: it ended, and took less.
    """

    chosen: Mapping[str, frozenset[object]] = field(default_factory=dict)
    excluded: Mapping[str, frozenset[object]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    excluded_texts: tuple[str, ...] = ()
    since_ns: int = 0
    until_ns: int = EVER_NS
    slower_than_s: float | None = None
    faster_than_s: float | None = None

    @property
    def chooses(self) -> bool:
        """False if it accepts every request."""
        return self != RequestFilter()

    @property
    def reads_prompts(self) -> bool:
        """True if summaries alone do not decide."""
        return bool(self.texts or self.excluded_texts)

    def accepts(self, summary: Summary, now_ns: int) -> bool:
        """Tell whether a request is chosen, as far as its summary decides."""
        return (
            self.since_ns <= summary.start_ns < self.until_ns
            and all(_has(summary, kind, values) for kind, values in self.chosen.items())
            and not any(_has(summary, kind, values) for kind, values in self.excluded.items())
            and self._accepts_duration(summary, now_ns)
        )

    def accepts_prompt(self, prompt: str) -> bool:
        """Tell whether a request with this prompt is chosen, as far as the prompt decides."""
        found = _folded(prompt)
        return all(_folded(text) in found for text in self.texts) and not any(
            _folded(text) in found for text in self.excluded_texts
        )

    def _accepts_duration(self, summary: Summary, now_ns: int) -> bool:
        took_s = ((summary.end_ns or now_ns) - summary.start_ns) / 1e9
        if self.slower_than_s is not None and took_s <= self.slower_than_s:
            return False
        return self.faster_than_s is None or (summary.end_ns is not None and took_s < self.faster_than_s)


def _has(summary: Summary, kind: str, values: frozenset[object]) -> bool:
    return not values.isdisjoint(_VALUES[kind](summary))


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
