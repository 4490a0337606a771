"""The program `transcribe` of the KV node: a window's language, text and weights of attention.

    frames      the encoder's states, committed: keys and values of the cross-attention
    language    the start token alone, if the language is not known
    text        the tokens in front, then one token after the other
    text        again from the frames on, at a higher temperature, if the text is poor

All of it is one context: `Pass.after` drops a text, and the frames stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch

from models.programs import FRAME_ROUTE, Pass
from models.speech_to_text.attempt import Attempt, Decode, seed_of
from models.speech_to_text.options import SpeechOptions
from models.speech_to_text.transcript import compression_ratio
from models.whisper.attempt import is_poor, is_silent, processors_of
from models.whisper.settings import WhisperSettings

CONTEXT: Final = "window"


class WindowArgs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Arguments of a window's walk.

    Attributes:
        seek: the first mel frame of the window.
        language: the token of the language; None: it is detected, if the model has several.
        prompt_ids: the tokens of a prompt, with the one that begins it.
        has_times: times are written.
        temperatures: of the attempts, in their order.
    """

    options: SpeechOptions
    seek: int
    language: int | None
    prompt_ids: list[int]
    has_times: bool
    temperatures: list[float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """What a run knows of its checkpoint.

    Attributes:
        generation: transformers' `GenerationConfig`.
    """

    settings: WhisperSettings
    generation: Any
    decode: Decode


@dataclass(slots=True, eq=False)
class Transcriber:
    """One run of the program (`models.programs.Driver`).

    Args:
        node: a `models.whisper.decoder.WhisperDecoder`.
        states: the encoder's, (frames, hidden).
        args: of the walk.
        seed: of the request.
    """

    node: Any
    checkpoint: Checkpoint
    states: torch.Tensor
    args: WindowArgs
    seed: int
    max_contexts: int = 1
    counts: dict[str, int] = field(default_factory=lambda: {"attempts": 0, "forwards": 0})
    _written: bool = False
    _language: int | None = None
    _attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._language = self.args.language

    @property
    def max_tokens(self) -> int:
        return len(self.states) + self.checkpoint.settings.positions

    @property
    def longest_pass(self) -> int:
        return len(self.states)

    @property
    def _detects(self) -> bool:
        return self._language is None and bool(self.checkpoint.settings.languages)

    def passes(self) -> Sequence[Pass]:
        self.counts["forwards"] += 1
        if not self._written:
            routes = torch.full((len(self.states),), FRAME_ROUTE, dtype=torch.int8)
            return [Pass(context=CONTEXT, embeds=self.states, routes=routes, commits=True)]
        if self._detects:
            return [self._text([self.checkpoint.settings.start], 0, logits=[0], commits=False)]
        if not self._attempts:
            self._attempts.append(self._attempt())
        attempt = self._attempts[-1]
        if attempt.tokens:
            return [self._text(attempt.tokens[-1:], len(attempt.ids) - 1, logits=[0])]
        before = list(attempt.before)
        start = before.index(self.checkpoint.settings.start)
        return [self._text(before, 0, logits=[start, len(before) - 1])]

    def _text(self, ids: list[int], first: int, *, logits: list[int], commits: bool = True) -> Pass:
        """A pass over tokens of the text, from place `first` in it on."""
        return Pass(
            context=CONTEXT,
            ids=ids,
            positions=torch.arange(first, first + len(ids)),
            commits=commits,
            after=len(self.states) + first,
            logits=logits,
        )

    def _attempt(self) -> Attempt:
        settings, args = self.checkpoint.settings, self.args
        task = args.options.task
        first = settings.first_tokens(self._language, task, has_times=args.has_times)
        before = [*args.prompt_ids, *first]
        number = len(self._attempts)
        self.counts["attempts"] += 1
        return Attempt(
            before=before,
            processors=processors_of(self.checkpoint.generation, begin=len(before), has_times=args.has_times),
            temperature=args.temperatures[number],
            most=settings.most_tokens(len(before)),
            ends={settings.end},
            seed=seed_of(self.seed, "whisper", args.seek, number),
        )

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        [found] = hidden
        settings = self.checkpoint.settings
        if not self._written:
            self._written = True
            return None
        if self._detects:
            tokens = torch.tensor(sorted(settings.languages.values()), device=found.device)
            self._language = int(tokens[found[0, tokens].argmax()])
            return None
        attempt = self._attempts[-1]
        if not attempt.tokens:
            attempt.no_speech = float(found[0].softmax(-1)[settings.no_timestamps - 1])
        attempt.take(found[-1])
        return self._ended(attempt) if attempt.is_over else None

    def _ended(self, attempt: Attempt) -> Mapping[str, torch.Tensor] | None:
        """The outputs of a text that stays; None if there is another attempt."""
        options, ratio = self.args.options, compression_ratio(self.checkpoint.decode(attempt.text_tokens))
        silent = is_silent(attempt, options)
        has_more = len(self._attempts) < len(self.args.temperatures)
        if not silent and has_more and is_poor(attempt, ratio, options):
            self._attempts.append(self._attempt())
            return None
        figures = [
            attempt.avg_logprob,
            ratio,
            attempt.no_speech,
            attempt.temperature,
            float(silent),
            -1.0 if self._language is None else float(self._language),
        ]
        return {
            "tokens": torch.tensor(attempt.text_tokens, dtype=torch.int64),
            "logprobs": torch.tensor(attempt.logprobs[: len(attempt.text_tokens)], dtype=torch.float64),
            "figures": torch.tensor(figures, dtype=torch.float64),
            "attention": self._attention(attempt),
        }

    def _attention(self, attempt: Attempt) -> torch.Tensor:
        """The weights of the heads that follow the speech, (heads, tokens - 1, frames); empty if not needed.

        The last token, which is not fed back, has none.
        """
        if "word" not in self.args.options.timestamps or len(attempt.tokens) < 2:
            return torch.zeros(0)
        weights = self.node.attention_to_frames(
            attempt.ids[:-1], self.states, self.checkpoint.settings.alignment_heads
        )
        kept: torch.Tensor = weights[:, len(attempt.before) :].cpu()
        return kept


@dataclass(frozen=True, slots=True)
class Transcribe:
    """Starts runs (`models.programs.Program`)."""

    checkpoint: Checkpoint

    def __call__(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Transcriber:
        window = msgspec.convert(dict(args), WindowArgs)
        return Transcriber(node, self.checkpoint, inputs["states"], window, seed)
