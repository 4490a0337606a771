"""Outputs of a step: sampled tokens, scores and pooled states become one output per token or prompt."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isnan
from typing import Final

import numpy as np

from shared.errors import DalSegnoError
from workers.data_plane.port import Array
from workers.kv_engine.kv_transfer import KVTransfer
from workers.kv_engine.outputs import (
    Output,
    PromptOutput,
    StepFailedError,
    TokenOutput,
    TokenScore,
    as_dalsegno_error,
)
from workers.kv_engine.runner import ForwardResult, Runner
from workers.kv_engine.sampling.sampler import NOT_A_TOKEN
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import FinishReason, SequenceSpec

_NO_VALUES: Final[Mapping[str, Array]] = {}


@dataclass(slots=True)
class StepOutcome:
    """The outputs and the failures of a step.

    Attributes:
        finished: the keys of the sequences whose last output is among the outputs.
        not_numbers: the keys of the sequences whose logits or states are NaN or infinite.
        failures: the errors of sequences that failed for another reason, by key.
        requested: how many of the step's sequences were to have an output.
    """

    outputs: list[Output] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    not_numbers: list[str] = field(default_factory=list)
    failures: dict[str, DalSegnoError] = field(default_factory=dict)
    requested: int = 0

    def add(self, output: Output) -> None:
        """Append an output."""
        self.outputs.append(output)
        if output.finish is not None:
            self.finished.append(output.key)

    @property
    def ended(self) -> list[str]:
        """The keys of all sequences that leave the engine with this step."""
        return [*self.finished, *self.not_numbers, *self.failures]

    def raise_failures(self) -> None:
        """Raise one error for all failures, if there are any.

        Raises:
            StepFailedError: with the outputs of the other sequences.
        """
        if not self.not_numbers and not self.failures:
            return
        message = "; ".join(error.message for error in self.failures.values())
        if self.not_numbers:
            message = (
                f"the model's logits or states are not numbers for {len(self.not_numbers)} of "
                f"{self.requested} sequences; its weights are damaged, or its dtype is too narrow for it"
            )
        raise StepFailedError(message, keys=self.not_numbers, outputs=self.outputs, others=self.failures)


class OutputBuilder:
    """Builds the outputs of each step, and appends the new tokens to their sequences."""

    def __init__(self, scheduler: Scheduler, runner: Runner, transfer: KVTransfer) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._transfer = transfer

    def build(
        self,
        spans: Items[Span],
        tokens: Items[list[int]],
        result: ForwardResult,
        failures: dict[str, DalSegnoError],
        *,
        step: int,
        values: Items[Mapping[str, Array]] = (),
    ) -> StepOutcome:
        """Build the outputs of step number `step`.

        `tokens` are the new tokens of each span, `failures` the sequences that failed before the forward,
        `values` those of each new token of a fed node.
        """
        outcome = StepOutcome(failures={**failures, **result.failures})
        outcome.outputs += result.states
        made = iter(values)
        scores, prompt_scores = iter(result.scores), iter(result.prompt_scores)
        for span, new in zip(spans, tokens, strict=True):
            sequence, spec = span.sequence, span.sequence.spec
            of_prompt = _scores_of_prompt(span, prompt_scores) if result.prompt_scores else []
            token = new[-1] if new else None
            score = next(scores) if new and spec.logprobs is not None else None
            sent = next(made, _NO_VALUES) if new else _NO_VALUES
            if len(new) > 1:
                outcome.outputs += _accepted_outputs(sequence, new[:-1], step)
            if spec.key in outcome.failures:
                continue
            is_last = span.reaches_end and spec.max_tokens == 0
            is_pooled = is_last and spec.pooling is not None
            vector = self._runner.poolers[spec.key].vector() if is_pooled else None
            outcome.requested += (bool(of_prompt) or token is not None) + is_pooled
            if token == NOT_A_TOKEN or any(isnan(one.logprob) for one in of_prompt) or _is_broken(vector):
                outcome.not_numbers.append(spec.key)
                self._scheduler.hide_from_cache(sequence)
                continue
            if of_prompt or is_last:
                prompt = PromptOutput(
                    key=spec.key,
                    scores=tuple(of_prompt),
                    finish=FinishReason.LENGTH if is_last else None,
                    step=step,
                    vector=vector,
                    cached_tokens=self._cached_tokens(sequence) if is_last else 0,
                )
                outcome.add(prompt)
            if token is None:
                continue
            try:
                outcome.add(self._token_output(sequence, token, score, step, sent))
            except Exception as error:  # noqa: BLE001 - an export without room must not fail the other sequences
                outcome.failures[spec.key] = as_dalsegno_error(error)
        return outcome

    def _cached_tokens(self, sequence: Sequence) -> int:
        return self._scheduler.cached_tokens(sequence) if sequence.spec.caches_prompt else 0

    def _token_output(
        self,
        sequence: Sequence,
        token: int,
        score: TokenScore | None,
        step: int,
        values: Mapping[str, Array],
    ) -> TokenOutput:
        spec, index = sequence.spec, sequence.generated
        sequence.ids.append(token)
        finish = spec.finish_reason(token, index + 1)
        return TokenOutput(
            key=spec.key,
            token_id=token,
            index=index,
            finish=finish,
            step=step,
            score=_cut(score, spec) if score is not None else None,
            kv=self._transfer.export(sequence) if finish is not None else None,
            values=values,
        )


def _accepted_outputs(sequence: Sequence, tokens: list[int], step: int) -> list[Output]:
    """Return the outputs of accepted drafts, which the sequence holds already."""
    first, key = sequence.generated - len(tokens), sequence.spec.key
    return [
        TokenOutput(key=key, token_id=token, index=index, finish=None, step=step)
        for index, token in enumerate(tokens, first)
    ]


def _scores_of_prompt(span: Span, scores: Iterator[TokenScore]) -> list[TokenScore]:
    return [_cut(score, span.sequence.spec) for score in islice(scores, len(span.scored_positions))]


def _cut(score: TokenScore, spec: SequenceSpec) -> TokenScore:
    """Limit the likeliest tokens to the number requested; another sequence of the step may want more."""
    return score if len(score.top) == spec.logprobs else replace(score, top=score.top[: spec.logprobs])


def _is_broken(vector: Array | None) -> bool:
    return vector is not None and not np.isfinite(vector.data.view("<f4")).all()
