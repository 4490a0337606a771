"""Reasoning in answers: the marks around it, where a prompt leaves it, and its separation from the answer.

    <think> ... </think>                Qwen3, DeepSeek, GLM, MiniMax, SmolLM3 and others
    [THINK] ... [/THINK]                Mistral
    <seed:think> ... </seed:think>      Seed-OSS
    <|channel>thought ... <channel|>    Gemma 4

The chat template drops or writes these marks, so the format is detected in the template's source. A template
may end the prompt with the opening mark: then the answer begins within the reasoning, and the first chunk of
its output says so. A worker reports the name of its model's format when it joins.

This module is pure: it needs no template language and no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final

BEGINS_INSIDE: Final = "reasoning"
"""The key in the metadata of an answer's first chunk: the answer begins within the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks before and after the reasoning of an answer.

    Attributes:
        tokens: what may be a special token, and has to be in the text; empty: the marks.
    """

    name: str
    opens: str
    closes: str
    tokens: tuple[str, ...] = ()

    @property
    def visible(self) -> tuple[str, ...]:
        """The tokens that have to be in the text."""
        return self.tokens or (self.opens, self.closes)


THINK: Final = ReasoningFormat(name="think", opens="<think>", closes="</think>")
MISTRAL: Final = ReasoningFormat(name="mistral", opens="[THINK]", closes="[/THINK]")
SEED: Final = ReasoningFormat(name="seed", opens="<seed:think>", closes="</seed:think>")
GEMMA: Final = ReasoningFormat(
    name="gemma", opens="<|channel>thought\n", closes="<channel|>", tokens=("<|channel>", "<channel|>")
)
FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {known.name: known for known in (THINK, MISTRAL, SEED, GEMMA)}
)


def format_in(source: str) -> ReasoningFormat | None:
    """The format of the reasoning that a template knows; None if it knows none."""
    return next((known for known in FORMATS.values() if known.closes in source), None)


def begins_inside(found: ReasoningFormat, prompt: str) -> bool | None:
    """True if the answer to a prompt begins within the reasoning, None if the prompt has ended it."""
    text = prompt.rstrip()
    if text.endswith(found.opens.rstrip()):
        return True
    return None if text.endswith(found.closes) else False


@dataclass(slots=True)
class Parted:
    """The new parts of an answer."""

    reasoning: str = ""
    content: str = ""


class _State(Enum):
    BEFORE = auto()
    """Nothing but white space, or a part of the opening mark."""
    OPENED = auto()
    """White space behind the opening mark."""
    INSIDE = auto()
    CLOSED = auto()
    """White space behind the closing mark."""
    CONTENT = auto()


class ReasoningParser:
    """Parts one answer. A fold over its text: how that is cut into pieces makes no difference.

    White space around the reasoning belongs to neither part. An answer that does not begin with reasoning is
    content as a whole.

    Args:
        is_inside: the answer begins within the reasoning.

    Attributes:
        has_reasoned: the reasoning has begun.
    """

    def __init__(self, found: ReasoningFormat, *, is_inside: bool) -> None:
        self._opens = found.opens
        self._closes = found.closes
        self._state = _State.OPENED if is_inside else _State.BEFORE
        self._held = ""
        self.has_reasoned = is_inside

    @property
    def is_inside(self) -> bool:
        """The closing mark is still to come."""
        return self._state in (_State.OPENED, _State.INSIDE)

    @property
    def has_ended(self) -> bool:
        """All further text is content."""
        return self._state in (_State.CLOSED, _State.CONTENT)

    def push(self, text: str) -> Parted:
        """The new parts after the next piece."""
        self._held += text
        parted = Parted()
        while self._held and self._step(parted):
            pass
        return parted

    def end(self) -> Parted:
        """The parts that were held back."""
        held, self._held = self._held, ""
        if self._state is _State.BEFORE:
            return Parted(content=held)
        return Parted(reasoning=held.rstrip()) if self._state is _State.INSIDE else Parted()

    def _step(self, parted: Parted) -> bool:
        """Read what is held; true if the state has changed."""
        state = self._state
        match state:
            case _State.BEFORE:
                text = self._held.lstrip()
                if text.startswith(self._opens):
                    self._held = text[len(self._opens) :]
                    self._state = _State.OPENED
                    self.has_reasoned = True
                elif not self._opens.startswith(text):
                    self._state = _State.CONTENT
            case _State.OPENED | _State.CLOSED:
                self._held = self._held.lstrip()
                if self._held:
                    self._state = _State.INSIDE if state is _State.OPENED else _State.CONTENT
            case _State.INSIDE:
                self._read_reasoning(parted)
            case _State.CONTENT:
                parted.content += self._held
                self._held = ""
        return self._state is not state

    def _read_reasoning(self, parted: Parted) -> None:
        text, mark, rest = self._held.partition(self._closes)
        if mark:
            parted.reasoning += text.rstrip()
            self._held = rest
            self._state = _State.CLOSED
            return
        longest = min(len(text), len(self._closes) - 1)
        begun = next(n for n in range(longest, -1, -1) if text.endswith(self._closes[:n]))
        known = text[: len(text) - begun].rstrip()
        parted.reasoning += known
        self._held = text[len(known) :]


# ---- what a request asks of the template -------------------------------------------------------------------

SWITCHES: Final = ("enable_thinking", "thinking")
"""The variables by which templates let a model think, or not."""
EFFORT: Final = "reasoning_effort"
"""The variable by which templates take an effort."""
BUDGETS: Final[Mapping[str, int | None]] = MappingProxyType(
    {"minimal": 1024, "low": 1024, "medium": 8192, "high": 24_576, "xhigh": None}
)
"""The most tokens of reasoning for each effort, of a model whose template takes none; None: no limit."""


def template_options(
    options: Mapping[str, Any], effort: str | None, variables: frozenset[str], *, can_think: bool
) -> dict[str, Any]:
    """The variables of a template that has `variables`, for a request's options and effort.

    Raises:
        ValueError: the template takes no such option, or cannot follow the effort.
    """
    found: dict[str, Any] = {}
    switch = next((name for name in SWITCHES if name in variables), None)
    for name, value in options.items():
        if name in variables:
            found[name] = value
        elif name not in SWITCHES:
            known = ", ".join(sorted(variables)) or "none"
            raise ValueError(
                f"expected options of this model's chat template, which are: {known}; found {name!r:.80}"
            )
        elif switch is not None:
            found[switch] = value
        elif bool(value) != can_think:
            raise ValueError(
                f"{name}: {'this model always thinks' if can_think else 'this model does not think'}"
            )
    if effort is None:
        return found
    if EFFORT in variables:
        return {EFFORT: effort, **found}
    if switch is not None:
        return {switch: effort != "none", **found}
    if effort == "none" and can_think:
        raise ValueError(f"{EFFORT}: expected a level of effort, found 'none'; this model always thinks")
    if effort != "none" and not can_think:
        raise ValueError(f"{EFFORT}: expected 'none', found {effort!r}; this model does not think")
    return found


def budget_of(budget: int | None, effort: str | None, variables: frozenset[str]) -> int | None:
    """The most tokens of reasoning that a request allows; None for no limit."""
    if budget is not None or effort is None or EFFORT in variables:
        return budget
    return BUDGETS.get(effort)
