"""Reasoning in answers: the marks around it, and where a prompt leaves it.

    <think> ... </think>                Qwen3, DeepSeek, GLM, MiniMax, SmolLM3 and others
    [THINK] ... [/THINK]                Mistral
    <seed:think> ... </seed:think>      Seed-OSS
    <|channel>thought ... <channel|>    Gemma 4
    <|channel|>analysis<|message|> ... <|end|>    gpt-oss (`models.text.harmony`)

The chat template drops or writes these marks, so the format is detected in the template's source. A template
may end the prompt with the opening mark: then the answer begins within the reasoning, and the first chunk of
its output says so. A worker reports the name of its model's format when it joins.

This module is pure: it needs no template language and no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

BEGINS_INSIDE: Final = "reasoning"
"""The key in the metadata of an answer's first chunk: the answer begins within the reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The marks before and after the reasoning of an answer.

    Attributes:
        tokens: what may be a special token, and has to be in the text; empty: the marks.
        sign: what a template contains whose model has this format; empty: the closing mark.
        behind: the text behind the closing mark, whatever follows.
        answer: the text after that, before an answer without tool calls.
        message_key: the key of a message by which the template takes the reasoning of earlier answers, where
            it is not `reasoning_content`.
    """

    name: str
    opens: str
    closes: str
    tokens: tuple[str, ...] = ()
    sign: str = ""
    behind: str = ""
    answer: str = ""
    message_key: str = ""

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
HARMONY: Final = ReasoningFormat(
    name="harmony",
    opens="<|channel|>analysis<|message|>",
    closes="<|end|>",
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    sign="<|channel|>analysis<|message|>",
    behind="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    message_key="thinking",
)
FORMATS: Final[Mapping[str, ReasoningFormat]] = MappingProxyType(
    {known.name: known for known in (THINK, MISTRAL, SEED, GEMMA, HARMONY)}
)


def format_in(source: str) -> ReasoningFormat | None:
    """The format of the reasoning that a template knows; None if it knows none."""
    return next((known for known in FORMATS.values() if (known.sign or known.closes) in source), None)


def begins_inside(found: ReasoningFormat, prompt: str) -> bool | None:
    """True if the answer to a prompt begins within the reasoning, None if the prompt has ended it."""
    text = prompt.rstrip()
    if text.endswith(found.opens.rstrip()):
        return True
    return None if text.endswith(found.closes) else False


def is_begun(found: ReasoningFormat, answer: str) -> bool:
    """True if the beginning of an answer ends within its reasoning."""
    return answer.lstrip().startswith(found.opens.rstrip()) and found.closes not in answer


@dataclass(slots=True)
class Parted:
    """The new parts of an answer."""

    reasoning: str = ""
    content: str = ""


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
