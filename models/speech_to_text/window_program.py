"""The program `transcribe`: a window's text, of the encoder's states, for models without times and attempts.

opening   what the model hears, and the tokens in front: committed, with logits at the end
text      one token after the other

A decoder with a cross-attention opens with frames, and then the tokens in front (`WriteText`). A language
model opens with a prompt, in which the states stand in the place of a token (`WriteAfterPrompt`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from transformers import LogitsProcessorList

from models.programs import FRAME_ROUTE, Pass
from models.speech_to_text.attempt import Attempt, seed_of

CONTEXT: Final = "window"
LONGEST_PASS: Final = 512
"""The most tokens of a prompt that are computed at once."""


class TextArgs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of a window's walk, for its program.

    Attributes:
        first: the first sample of the window; the draws follow from it.
        before: the tokens in front of the text.
        most: the most tokens, those in front included.
        temperature: 0 chooses the likeliest token.
        is_silent: there is nothing to hear: the text is empty.
    """

    first: int
    before: list[int]
    most: int
    temperature: float
    is_silent: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Writer:
    """One run of the program (`models.programs.Driver`).

    Args:
        opening: its first passes, which commit; the last of them has logits.
        attempt: the text.
        cells: those that the opening takes besides the tokens in front.
        is_silent: there is nothing to hear: the text is empty.
    """

    opening: list[Pass]
    attempt: Attempt
    cells: int
    is_silent: bool
    max_contexts: int = 1
    counts: dict[str, int] = field(default_factory=lambda: {"forwards": 0})

    @property
    def max_tokens(self) -> int:
        return self.cells + self.attempt.most

    @property
    def longest_pass(self) -> int:
        return max(one.tokens for one in self.opening)

    def passes(self) -> Sequence[Pass]:
        if self.is_silent:
            return []
        self.counts["forwards"] += 1
        if self.opening:
            return self.opening[:1]
        return [Pass(context=CONTEXT, ids=self.attempt.tokens[-1:], commits=True, logits=[0])]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        if self.opening:
            del self.opening[0]
        if not self.is_silent:
            if self.opening:
                return None
            [logits] = hidden
            self.attempt.take(logits[0])
            if not self.attempt.is_over:
                return None
        return {
            "tokens": torch.tensor(self.attempt.tokens, dtype=torch.int64),
            "logprobs": torch.tensor(self.attempt.logprobs, dtype=torch.float64),
        }


@dataclass(frozen=True, slots=True)
class WriteText:
    """Starts runs (`models.programs.Program`). Their outputs have the token that ends the text, if it came.

    Attributes:
        family: part of the seed of draws.
        ends: the tokens that end the text.
    """

    family: str
    ends: Collection[int]

    def __call__(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Writer:
        window, states = msgspec.convert(dict(args), TextArgs), node.frames_of(inputs["states"])
        routes = torch.full((len(states),), FRAME_ROUTE, dtype=torch.int8)
        frames = Pass(context=CONTEXT, embeds=states, routes=routes, commits=True)
        before = Pass(
            context=CONTEXT,
            ids=window.before,
            positions=torch.arange(len(window.before)),
            commits=True,
            logits=[len(window.before) - 1],
        )
        return self.writer(window, [frames, before], cells=len(states), seed=seed)

    def writer(self, window: TextArgs, opening: list[Pass], *, cells: int, seed: int) -> Writer:
        """A run over a window with this opening."""
        attempt = Attempt(
            before=window.before,
            processors=LogitsProcessorList(),
            temperature=window.temperature,
            most=window.most,
            ends=self.ends,
            seed=seed_of(seed, self.family, window.first, 0),
        )
        return Writer(opening=opening, attempt=attempt, cells=cells, is_silent=window.is_silent)


@dataclass(frozen=True, slots=True)
class WriteAfterPrompt(WriteText):
    """Starts runs of a language model, whose prompt has one token in the place of the states.

    Attributes:
        place: that token.
    """

    place: int

    def __call__(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Writer:
        window, states = msgspec.convert(dict(args), TextArgs), inputs["states"]
        at = window.before.index(self.place)
        ids = [*window.before[:at], *[self.place] * len(states), *window.before[at + 1 :]]
        rows = torch.arange(at, at + len(states), device=states.device)
        embeds = node.splice(torch.tensor(ids, device=states.device), states, rows)
        parts = embeds.split(LONGEST_PASS)
        opening = [Pass(context=CONTEXT, embeds=part, commits=True) for part in parts[:-1]]
        opening.append(Pass(context=CONTEXT, embeds=parts[-1], commits=True, logits=[len(parts[-1]) - 1]))
        return self.writer(window, opening, cells=len(states) - 1, seed=seed)
