"""A sequence: what one request asks of the engine, and how far it is.

Knows neither tensors nor the pool's bytes: token ids, counters, block numbers. A request that is
resumed comes with the tokens an earlier attempt generated (`prefix_ids`); they continue the positions,
count to `max_tokens`, and the draws of randomness go on behind them, so the answer goes on as if
nothing had happened.
"""

from dataclasses import dataclass, field
from typing import Final

from workers.kv_engine.cache.prefix_cache import PrefixNode
from workers.kv_engine.guide_state import GuideState
from workers.kv_engine.sequence_spec import SequenceSpec

_NONE: Final = range(0)


@dataclass(slots=True)
class DraftLength:
    """How many tokens may be drafted for one sequence in a step: doubled when all were accepted, else halved.

    Attributes:
        limit: the largest allowed number.
        current: the number allowed now, from 1 to `limit`.
    """

    limit: int
    current: int = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.limit

    def update(self, *, drafted: int, accepted: int) -> None:
        """Adapt to a step that drafted so many tokens, of which so many were accepted."""
        if not drafted:
            return
        self.current = min(self.limit, self.current * 2) if accepted == drafted else max(1, self.current // 2)


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence in the engine: its spec, and how far it is.

    Attributes:
        ids: prompt, prefix, and what was generated since.
        computed: how many of `ids` have their keys and values in the pool, or bring them.
        scored: how many of `ids` were computed at most: of a prompt that is scored or pooled, so far it is
            told.
        blocks: the pool's blocks it has, in order; `path`, those of them that the prefix cache has, too.
        keeps: whether those that are full go into the prefix cache.
        row: its place in the step's tables while it runs; `admissions`, how often it was given one.
        arrival: its number among all that came.
        draft_length: how many guesses it may have; None before the first.
        guide_state: what it may choose, where it has a guide.
        adjusts_logits: whether its spec does; `can_speculate`, whether it may.
        held: it keeps row and blocks, and takes part in no step.
    """

    spec: SequenceSpec
    ids: list[int] = field(init=False)
    adjusts_logits: bool = field(init=False)
    can_speculate: bool = field(init=False)
    draft_length: DraftLength | None = None
    guide_state: GuideState | None = None
    computed: int = 0
    reported: int = 0
    blocks: list[int] = field(default_factory=list)
    cached_path: list[PrefixNode] = field(default_factory=list)
    is_cacheable: bool = False
    row: int | None = None
    admissions: int = 0
    arrival: int = 0
    held: bool = False

    def __post_init__(self) -> None:
        self.ids = [*self.spec.prompt_ids, *self.spec.prefix_ids]
        self.adjusts_logits = self.spec.adjusts_logits
        self.can_speculate = self.spec.can_speculate
        self.computed = self.brought

    @property
    def imported(self) -> int:
        """How many tokens it brings keys and values of."""
        # The next token is sampled behind the last one, which is therefore always run.
        return min(self.spec.kv.shape[2], len(self.ids) - 1) if self.spec.kv is not None else 0

    @property
    def needs_prompt_states(self) -> bool:
        """Whether there are tokens of its prompt that are to be scored or pooled yet."""
        if self.spec.pooling is not None and self.spec.pooling.needs_all:
            return True
        return self.spec.scores_prompt and self.reported < len(self.spec.prompt_ids) - 1

    @property
    def pending(self) -> int:
        """How many tokens must be computed before the next one can be sampled; 1 is a decode."""
        return len(self.ids) - self.computed

    @property
    def generated(self) -> int:
        """How many tokens were generated, the prefix included: the index of the next draw."""
        return len(self.ids) - len(self.spec.prompt_ids)

    @property
    def reserved_tokens(self) -> int:
        """The most tokens it can ever come to."""
        return len(self.spec.prompt_ids) + self.spec.max_tokens


@dataclass(slots=True, eq=False)
class Span:
    """`count` tokens of a sequence, from position `start` on, computed in one step.

    Attributes:
        told: how many tokens of the prompt were scored before.
        guesses: how many of the tokens, the last ones, are guessed
        (`workers.kv_engine.speculative.proposer`).
    """

    # Not frozen: there is one for each row of a step, and what did not stand of its guesses is cut off.
    sequence: Sequence
    start: int
    count: int
    reported: int = 0
    drafted: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether all it computes is its sequence's last token, and what is guessed behind that."""
        return self.count == 1 + self.guesses

    @property
    def reaches_end(self) -> bool:
        """Whether nothing of the sequence is left to compute behind it."""
        return self.start + self.count == len(self.sequence.ids)

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token can be sampled behind it."""
        return self.reaches_end and self.sequence.spec.max_tokens > 0

    @property
    def unreported(self) -> range:
        """The positions of it that were not computed before."""
        end = self.start + self.count
        return range(min(max(self.start, self.told), end), end)

    @property
    def scored_positions(self) -> range:
        """The positions behind each of which it is told what the model thought of the prompt's next token."""
        spec = self.sequence.spec
        if not spec.scores_prompt:
            return _NONE
        return range(max(self.start, self.told), min(self.start + self.count, len(spec.prompt_ids) - 1))
