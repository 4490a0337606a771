"""The program `transcribe`: a window's text, of the encoder's states, for models without times and attempts.

frames   the encoder's states, committed: keys and values of the cross-attention
text     the tokens in front, then one token after the other
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from transformers import LogitsProcessorList

from models.programs import FRAME_ROUTE, Pass
from models.speech_to_text.attempt import Attempt, seed_of

CONTEXT: Final = "window"


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


@dataclass(slots=True, eq=False)
class Writer:
    """One run of the program (`models.programs.Driver`).

    Args:
        states: the encoder's, (frames, hidden).
        args: of the walk.
        attempt: the text.
    """

    states: torch.Tensor
    args: TextArgs
    attempt: Attempt
    max_contexts: int = 1
    counts: dict[str, int] = field(default_factory=lambda: {"forwards": 0})
    _written: bool = False

    @property
    def max_tokens(self) -> int:
        return len(self.states) + self.args.most

    @property
    def longest_pass(self) -> int:
        return len(self.states)

    def passes(self) -> Sequence[Pass]:
        if self.args.is_silent:
            return []
        self.counts["forwards"] += 1
        if not self._written:
            routes = torch.full((len(self.states),), FRAME_ROUTE, dtype=torch.int8)
            return [Pass(context=CONTEXT, embeds=self.states, routes=routes, commits=True)]
        new = self.attempt.tokens[-1:] or list(self.attempt.before)
        first = len(self.attempt.ids) - len(new)
        return [
            Pass(
                context=CONTEXT,
                ids=new,
                positions=torch.arange(first, first + len(new)),
                commits=True,
                logits=[len(new) - 1],
            )
        ]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        if self._written:
            [logits] = hidden
            self.attempt.take(logits[0])
        self._written = True
        if not self.args.is_silent and not self.attempt.is_over:
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
        end: the token that ends the text.
    """

    family: str
    end: int

    def __call__(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Writer:
        window = msgspec.convert(dict(args), TextArgs)
        attempt = Attempt(
            before=window.before,
            processors=LogitsProcessorList(),
            temperature=window.temperature,
            most=window.most,
            end=self.end,
            seed=seed_of(seed, self.family, window.first, 0),
        )
        return Writer(node.frames_of(inputs["states"]), window, attempt)
