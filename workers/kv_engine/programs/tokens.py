"""Sequences whose tokens come from a token program: their request to the driver, and their outputs."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from models.programs import NewTokens, TokenRequest
from models.sequence_request import SamplingParams
from shared.errors import BugError, ClientError, WorkerError
from workers.kv_engine.outputs import EmissionOutput, StepFailedError
from workers.kv_engine.sequence_spec import FinishReason, Sampling, SequenceSpec


def check_sequence(spec: SequenceSpec) -> None:
    """Refuse what exists only where tokens are sampled one by one.

    Raises:
        ClientError: the request asks for it.
    """
    asked = {
        "logprobs": spec.logprobs is not None or spec.scores_prompt,
        "a guide (response_format, tools, structured outputs)": spec.guide is not None,
        "embeddings and hidden states": spec.pooling is not None,
        "warm": spec.caches_prompt,
        "images and video": bool(spec.parts),
        "streams to other nodes": bool(spec.sends),
        "prefill and decode on different ranks": spec.export is not None or spec.kv is not None,
    }
    if refused := [name for name, is_asked in asked.items() if is_asked]:
        raise ClientError(
            f"this model generates several tokens at a time (program {spec.token_program!r}), which excludes "
            f"{', '.join(refused)}: leave it out",
            code="not_supported",
        )


def token_request(spec: SequenceSpec) -> TokenRequest:
    """Return what a sequence asks of its program."""
    return TokenRequest(
        prompt_ids=spec.prompt_ids,
        prefix_ids=spec.prefix_ids,
        max_tokens=spec.max_tokens,
        end_ids=spec.end_ids,
        sampling=_params(spec.sampling),
        options=spec.options,
        seed=spec.sampling.seed,
        choice=spec.sampling.sample_index,
    )


def _params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[*sampling.logit_bias],
        bad_words=[[*word] for word in sampling.bad_words],
        allowed_token_ids=[*sampling.allowed_token_ids],
        min_tokens=sampling.min_tokens,
        length_decay=sampling.length_decay,
    )


class TokenReports:
    """The outputs of one sequence: each emission of its driver, up to the end of the answer.

    Attributes:
        counts: what the driver has counted so far.
    """

    def __init__(self, spec: SequenceSpec, vocab_size: int) -> None:
        self.counts: Final[Counter[str]] = Counter()
        self._spec = spec
        self._vocab_size = vocab_size
        self._generated = len(spec.prefix_ids)

    def output(self, taken: NewTokens | None, step: int) -> EmissionOutput | None:
        """Return an emission, without the tokens after the end of the answer.

        Raises:
            BugError: the driver emits ids that are no tokens, or ends without any.
        """
        if taken is None:
            return None
        self.counts.update(taken.counts)
        ids, finish = self._cut([*taken.ids])
        if finish is None and taken.ended:
            finish = FinishReason.LENGTH
        if not ids and finish is None:
            return None
        if self._generated + len(ids) == 0:
            raise BugError(
                f"program {self._spec.token_program!r} ended without a token: expected one at least"
            )
        first, self._generated = self._generated, self._generated + len(ids)
        return EmissionOutput(
            key=self._spec.key,
            token_ids=tuple(ids),
            index=first,
            finish=finish,
            step=step,
            counts=dict(self.counts),
        )

    def _cut(self, ids: list[int]) -> tuple[list[int], FinishReason | None]:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise BugError(
                f"program {self._spec.token_program!r} emits token ids from {min(ids)} to {max(ids)}: "
                f"expected them below {self._vocab_size}"
            )
        for count, token_id in enumerate(ids, 1):
            finish = self._spec.finish_reason(token_id, self._generated + count)
            if finish is not None:
                return ids[:count], finish
        return ids, None


def check_numbers(results: Sequence[torch.Tensor]) -> None:
    """Check the results of passes before tokens are chosen by them.

    Raises:
        WorkerError: some are not numbers.
    """
    if not all(bool(result.amax(-1).isfinite().all()) for result in results if result.numel()):
        raise WorkerError(
            "the model's logits or states are not numbers; its weights are damaged, or its dtype is too "
            "narrow for it",
            code=StepFailedError.code,
        )
