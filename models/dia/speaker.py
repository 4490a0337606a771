"""The program `speak`: frames of codes, step by step, in one context or in two.

With guidance both contexts get the same codes; the first stands behind the text, the second behind none.
Guidance, the end of speech and the delays are transformers' own logits processors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import (
    DiaClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
)

from models.dia.delayed_frames import DelayedFrames
from models.dia.graph import Speech
from models.dia.options import CHUNK_FRAMES
from models.dia.settings import DiaSettings
from models.programs import FRAME_ROUTE, Pass, Turn

CONTEXTS: Final = ("text", "none")


class Speaker:
    """One run of the program (`models.programs.Driver`).

    Input: `states`, (contexts, bytes, width). Outputs of a call: those of `DelayedFrames.chunk`.

    Args:
        node: `models.dia.decoder.DiaDecoder`.
        around: the frames on both sides of a chunk that its sound depends on.
        seed: of the draws; on a CPU they are those of transformers after `torch.manual_seed(seed)`.

    Attributes:
        counts: steps, frames, and whether speech ended by itself.
    """

    def __init__(
        self,
        node: Any,
        states: torch.Tensor,
        speech: Speech,
        settings: DiaSettings,
        *,
        around: int,
        seed: int,
    ) -> None:
        self._node = node
        self._states = states
        self._speech = speech
        self._settings = settings
        self._delays = torch.tensor(settings.delays)
        self._frames = DelayedFrames(
            self._delays, first=speech.first_frames, most=CHUNK_FRAMES, around=around
        )
        self._rows = self._frames.rows
        self._rows.append(torch.full((len(settings.delays),), settings.bos))
        self._processors = _processors(speech, settings, node.codes)
        self._draws = torch.Generator().manual_seed(seed % 2**63)
        self._is_open = False
        self._is_finished = torch.zeros(len(settings.delays), dtype=torch.bool)
        self.max_contexts: Final = len(states)
        self.max_tokens: Final = len(states) * (states.shape[1] + speech.max_tokens)
        self.longest_pass: Final = states.shape[1]
        self.counts: Final = {"steps": 0, "frames": 0, "ended": 0}

    def passes(self) -> Sequence[Pass]:
        """The encoder's states of each context, then the last frame in each."""
        contexts = CONTEXTS[: self.max_contexts]
        if not self._is_open:
            routes = torch.full((self._states.shape[1],), FRAME_ROUTE, dtype=torch.int8)
            return [
                Pass(context=name, embeds=self._node.frames_of(states), routes=routes, commits=True)
                for name, states in zip(contexts, self._states, strict=True)
            ]
        row, at = self._node.rows_of(self._rows[-1][None]), len(self._rows) - 1
        return [
            Pass(context=name, embeds=row, positions=torch.tensor([at]), commits=True, logits=[0])
            for name in contexts
        ]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | Turn | None:
        """Choose the codes of a step; give a chunk if it is whole."""
        if not self._is_open:
            self._is_open = True
            return None
        self._step(torch.cat([one.view(len(self._delays), -1) for one in hidden]).cpu())
        if self._is_finished.all():
            self.counts["frames"] = self._frames.known - 1  # the last row is that of the end
            return self._frames.last(self.counts["frames"])
        chunk = self._frames.chunk()
        return None if chunk is None else Turn(outputs=chunk)

    def more(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Go on: nothing is fed back."""

    def _step(self, logits: torch.Tensor) -> None:
        """Choose codes by their logits, (contexts * channels, codes)."""
        settings, at = self._settings, len(self._rows)
        scores = self._processors(torch.empty(len(self._delays), at, dtype=torch.int64), logits)
        if self._speech.temperature > 0:
            chances = torch.softmax(scores, dim=-1)
            codes = torch.multinomial(chances, 1, generator=self._draws)[:, 0]
        else:
            codes = scores.argmax(-1)
        codes = codes.masked_fill(self._is_finished, settings.pad)
        self.counts["steps"] += 1
        if codes[0] == settings.eos and at < self._speech.max_tokens - settings.longest_delay:
            self.counts["ended"] = 1
        self._is_finished |= codes == settings.eos
        self._rows.append(torch.where(at <= self._delays, settings.bos, codes))


class Speak:
    """Starts runs (`models.programs.Program`).

    Args:
        around: as for `Speaker`.
    """

    def __init__(self, settings: DiaSettings, *, around: int) -> None:
        self._settings = settings
        self._around = around

    def __call__(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Speaker:
        speech = msgspec.convert(dict(args), Speech)
        return Speaker(node, inputs["states"], speech, self._settings, around=self._around, seed=seed)


def _processors(speech: Speech, settings: DiaSettings, codes: int) -> LogitsProcessorList:
    """What transformers' `generate` does with logits, in its order."""
    top_k, found = min(speech.top_k, codes), LogitsProcessorList()
    if speech.guidance_scale > 1:
        found.append(DiaClassifierFreeGuidanceLogitsProcessor(speech.guidance_scale, top_k or None))
    if speech.temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(speech.temperature)))
    found.append(DiaEOSChannelFilterLogitsProcessor(len(settings.delays), settings.eos))
    if speech.temperature > 0 and top_k:
        found.append(TopKLogitsWarper(top_k))
    if speech.temperature > 0 and speech.top_p < 1:
        found.append(TopPLogitsWarper(speech.top_p))
    found.append(
        DiaEOSDelayPatternLogitsProcessor(list(settings.delays), settings.eos, speech.max_tokens + 1)
    )
    return found
