"""Results of engine steps: generated tokens, prompt scores, embeddings, failures. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from shared.errors import DalSegnoError, WorkerError
from shared.tensors import Handle
from workers.data_plane.port import Array
from workers.kv_engine.sequence_spec import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """The log probability that the model gives a token.

    Attributes:
        logprob: the log-softmax of the raw logits, in float32, before temperature and filters.
        top: the likeliest token ids at the same position with their log probabilities, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOutput:
    """The result of (a part of) a prompt: token scores, an embedding, or cached keys and values.

    Attributes:
        scores: of consecutive prompt tokens. The outputs of a sequence continue one another, from the
            prompt's second token on.
        finish: set when the whole prompt is computed and no answer was requested; None while more follows.
        step: the number of the engine step that made it, from 1.
        vector: with `finish`, the requested embedding, (dimensions,) float32, or the requested hidden states,
            (tokens, hidden) float32.
        cached_tokens: with `finish` of a sequence that `caches_prompt`, how many of its first tokens are in
            the prefix cache now.
    """

    key: str
    scores: tuple[TokenScore, ...]
    finish: FinishReason | None
    step: int
    vector: Array | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One generated token. An end-of-sequence token is an output, too.

    Attributes:
        index: its index among the generated tokens, from 0, the prefix included.
        finish: the reason if it is the last token; None while more follow.
        step: the number of the engine step that made it, from 1.
        score: its log probability, if requested.
        kv: with `finish`, the exported keys and values of the sequence, if requested.
        values: by edge, what a fed node made after the token, (1, ...).
    """

    key: str
    token_id: int
    index: int
    finish: FinishReason | None
    step: int
    score: TokenScore | None = None
    kv: Handle | None = None
    values: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOutput:
    """Tensors that a step computed for tokens of a sequence, besides these: items of streams.

    Attributes:
        values: by edge, (n, ...) for n consecutive tokens; the outputs of a sequence continue one another.
        step: the number of the engine step that made it, from 1.
    """

    key: str
    values: Mapping[str, Array]
    step: int
    finish: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutput:
    """The outputs of a node call that runs a program (`workers.kv_engine.programs`).

    Attributes:
        values: by edge, in main memory.
        step: the number of the engine step that made them, from 1.
        finish: None if the run waits for the call of the next iteration.
        counts: what its driver has counted.
    """

    key: str
    values: Mapping[str, Array]
    step: int
    finish: FinishReason | None = FinishReason.STOP
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport:
    """A report of a run that goes on (`models.programs.Going`); all arrays are in main memory.

    Attributes:
        progress: plain values for the client.
        previews: by modality.
        state: a checkpoint of the run, by name; empty for none.
        step: the number of the engine step after which it was made, from 1.
    """

    key: str
    progress: Mapping[str, Any]
    previews: Mapping[str, Array]
    state: Mapping[str, Array]
    step: int
    finish: None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmissionOutput:
    """Tokens of a sequence that its token program has emitted together (`models.programs.NewTokens`).

    Attributes:
        token_ids: the tokens; empty only if the sequence ends without a further one.
        index: the index of the first of them among the generated tokens, the prefix included.
        finish: the reason if they are the last ones; None while more follow.
        step: the number of the engine step that made them, from 1.
        counts: what the program has counted so far.
    """

    key: str
    token_ids: tuple[int, ...]
    index: int
    finish: FinishReason | None
    step: int
    counts: Mapping[str, int]


Output: TypeAlias = PromptOutput | TokenOutput | StateOutput | ProgramOutput | ProgramReport | EmissionOutput
"""One result of a step. All prompt outputs of a sequence come before its first token output."""


class StepFailedError(WorkerError):
    """A step failed for some of its sequences. The engine has removed them and continues with the rest.

    Attributes:
        keys: the sequences that failed with this error.
        others: the sequences that failed with an error of their own.
        outputs: the outputs of the step for the other sequences.
    """

    code = "step_failed"

    def __init__(
        self,
        message: str,
        *,
        keys: Sequence[str],
        outputs: Sequence[Output] = (),
        others: Mapping[str, DalSegnoError] | None = None,
    ) -> None:
        super().__init__(message)
        self.keys: Final = tuple(keys)
        self.others: Final = dict(others or {})
        self.outputs: Final = list(outputs)


def as_dalsegno_error(error: Exception) -> DalSegnoError:
    """Return the error as one that may fail a single sequence."""
    if isinstance(error, DalSegnoError):
        return error
    return WorkerError(f"{type(error).__name__}: {error}", code=StepFailedError.code)
