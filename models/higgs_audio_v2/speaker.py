"""The program `speak`: frames of codes, step by step. Each code of a frame is a step later than the last one.

The delays and the end of speech are transformers' own logits processor.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.models.higgs_audio_v2.generation_higgs_audio_v2 import (
    HiggsAudioV2DelayPatternLogitsProcessor,
)

from models.dia.delayed_frames import DelayedFrames
from models.higgs_audio_v2.graph import Speech
from models.higgs_audio_v2.options import CHUNK_FRAMES
from models.higgs_audio_v2.settings import HiggsAudioSettings, Repeats
from models.programs import Pass, Turn

_CONTEXT: Final = "speech"


class Speaker:
    """One run of the program (`models.programs.Driver`).

    Input: `token_ids`, (T,). Outputs of a call: those of `DelayedFrames.chunk`.

    Args:
        node: `models.higgs_audio_v2.language_model.HiggsAudioLM`.
        around: the frames on both sides of a chunk that its sound depends on.
        seed: of the draws; on a CPU they are those of transformers after `torch.manual_seed(seed)`.

    Attributes:
        counts: steps, frames, and whether speech ended by itself.
    """

    def __init__(
        self,
        node: Any,
        token_ids: Sequence[int],
        speech: Speech,
        settings: HiggsAudioSettings,
        repeats: Repeats,
        *,
        around: int,
        seed: int,
    ) -> None:
        self._node = node
        self._ids = list(token_ids)
        self._speech = speech
        self._settings = settings
        self._repeats = repeats
        self._frames = DelayedFrames(
            torch.arange(settings.num_codebooks), first=speech.first_frames, most=CHUNK_FRAMES, around=around
        )
        self._rows = self._frames.rows
        self._processors = _processors(speech, settings)
        self._draws = torch.Generator().manual_seed(seed % 2**63)
        self.max_contexts: Final = 1
        self.max_tokens: Final = len(token_ids) + speech.max_tokens
        self.longest_pass: Final = len(token_ids)
        self.counts: Final = {"steps": 0, "frames": 0, "ended": 0}

    def passes(self) -> Sequence[Pass]:
        """The prompt, then the last frame."""
        if not self._rows:
            # As rows: the ids of text are none of the node's vocabulary, which is that of its codes.
            rows = self._node.embed(torch.tensor(self._ids, device=self._node.device))
            return [Pass(context=_CONTEXT, embeds=rows, commits=True, logits=[len(rows) - 1])]
        row, routes = self._node.rows_of(self._rows[-1][None]), torch.ones(1, dtype=torch.int8)
        return [Pass(context=_CONTEXT, embeds=row, routes=routes, commits=True, logits=[0])]

    def take(self, hidden: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor] | Turn | None:
        """Choose the codes of a step; give a chunk if it is whole."""
        self._step(hidden[0].cpu())
        ended = self.counts["ended"]
        if ended or self.counts["steps"] == self._speech.max_tokens:
            self.counts["frames"] = max(0, self._frames.known - ended)  # the last row may be that of the end
            return self._frames.last(self.counts["frames"])
        chunk = self._frames.chunk()
        return None if chunk is None else Turn(outputs=chunk)

    def more(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Go on: nothing is fed back."""

    def _step(self, logits: torch.Tensor) -> None:
        """Choose codes by their logits, (1, codebooks * codes)."""
        settings = self._settings
        scores = self._processors(torch.tensor([self._ids[-settings.num_codebooks :]]), logits)
        codes = self._drawn(scores) if self._speech.temperature > 0 else scores.argmax(-1)
        codes = self._without_repeats(codes, logits.view(settings.num_codebooks, -1))
        ends = codes == settings.audio_stream_eos_id
        is_ending = bool(ends.any()) or self._ids[-1] == settings.audio_delay_token_id
        self._ids.append(settings.audio_delay_token_id if is_ending else settings.audio_token_id)
        self._rows.append(codes)
        self.counts["steps"] += 1
        self.counts["ended"] = int(ends.all())

    def _without_repeats(self, codes: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The codes, those that repeat too often drawn again by their logits (`Repeats`)."""
        steps, most = self._repeats.ras_win_len, self._repeats.ras_win_max_num_repeat
        if steps is None or most is None or not self._rows:
            return codes
        last = torch.stack(self._rows[-steps:])
        marks = torch.tensor([self._settings.audio_stream_bos_id, self._settings.audio_stream_eos_id])
        repeated = ((last == codes) & ~torch.isin(last, marks)).sum(0) >= most
        if not repeated.any():
            return codes
        return codes.masked_scatter(repeated, self._drawn(logits[repeated]))

    def _drawn(self, scores: torch.Tensor) -> torch.Tensor:
        """Codes drawn by their scores: (n, codes) to (n,)."""
        return torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._draws)[:, 0]


class Speak:
    """Starts runs (`models.programs.Program`).

    Args:
        around: as for `Speaker`.
    """

    def __init__(self, settings: HiggsAudioSettings, repeats: Repeats, *, around: int) -> None:
        self._settings = settings
        self._repeats = repeats
        self._around = around

    def __call__(
        self, node: Any, inputs: Mapping[str, torch.Tensor], args: Mapping[str, Any], *, seed: int
    ) -> Speaker:
        return Speaker(
            node,
            inputs["token_ids"].tolist(),
            msgspec.convert(dict(args), Speech),
            self._settings,
            self._repeats,
            around=self._around,
            seed=seed,
        )


def _processors(speech: Speech, settings: HiggsAudioSettings) -> LogitsProcessorList:
    """What transformers' `generate` does with logits, in its order; each codebook is a row."""
    found = LogitsProcessorList(
        [
            HiggsAudioV2DelayPatternLogitsProcessor(
                delay_pattern=[number + 1 for number in range(settings.num_codebooks)],
                audio_bos_token_id=settings.audio_bos_token_id,
                audio_eos_token_id=settings.audio_delay_token_id,
                audio_stream_bos_id=settings.audio_stream_bos_id,
                audio_stream_eos_id=settings.audio_stream_eos_id,
                num_codebooks=settings.num_codebooks,
                codebook_size=settings.codebook_size,
            )
        ]
    )
    if speech.temperature > 0:
        if speech.temperature != 1:
            found.append(TemperatureLogitsWarper(float(speech.temperature)))
        if speech.top_k:
            found.append(TopKLogitsWarper(speech.top_k))
        if speech.top_p < 1:
            found.append(TopPLogitsWarper(speech.top_p))
    return found
