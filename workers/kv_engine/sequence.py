"""Live sequences and spans: the progress of each request in the engine. Imports no torch.

A sequence holds token ids, counters and block numbers, but no tensors. A resumed request brings the tokens
that an earlier attempt generated (`SequenceSpec.prefix_ids`). They continue the positions, count towards
`max_tokens`, and the random draws continue after them, so the answer is the one without an interruption.
"""

from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from workers.kv_engine.cache.prefix_cache import Bound, PrefixNode
from workers.kv_engine.guide_state import GuideState
from workers.kv_engine.prompt_parts import Contents, PromptParts
from workers.kv_engine.sequence_spec import SequenceSpec, tokens_in
from workers.threads.engine_work import EngineWork

if TYPE_CHECKING:
    from models.transformers_lm.adapters import AdapterWeights

_NO_POSITIONS: Final = range(0)
_PRIOR_DRAFTS: Final = 2.0
"""The weight of what is expected, in drafts."""
_KEPT: Final = 0.9
"""The weight of earlier drafts after each new one."""
_KEPT_UNDRAFTED: Final = 0.99
"""That after each step without one: half of it after 69 steps."""


@dataclass(slots=True)
class DraftLength:
    """The number of tokens to draft for one sequence: doubled when all were accepted, halved when not.

    Attributes:
        limit: the largest allowed number.
        current: the number allowed now, from 1 to `limit`.
    """

    limit: int
    current: int = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.limit

    def update(self, *, drafted: int, accepted: int) -> None:
        """Adapt to the outcome of one step."""
        if not drafted:
            return
        self.current = min(self.limit, self.current * 2) if accepted == drafted else max(1, self.current // 2)


@dataclass(slots=True)
class Acceptance:
    """The drafted tokens that were compared with the model's, and those that were the same.

    Attributes:
        is_new: nothing was drafted for the sequence yet.
    """

    compared: float = 0.0
    same: float = 0.0
    is_new: bool = True

    def share(self, expected: float) -> float:
        """Return the share of accepted tokens, near `expected` as long as few were seen."""
        return (self.same + expected * _PRIOR_DRAFTS) / (self.compared + _PRIOR_DRAFTS)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a draft: nothing is known of the tokens behind the first wrong one."""
        self._forget(_KEPT)
        self.compared += min(drafted, accepted + 1)
        self.same += accepted

    def skip(self) -> None:
        """Count a step in which a draft would not have paid."""
        self._forget(_KEPT_UNDRAFTED)

    def _forget(self, kept: float) -> None:
        self.compared *= kept
        self.same *= kept


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The snapshots of a running sequence with recurrent states (`workers.kv_engine.cache.state_snapshots`).

    Attributes:
        source: the cached block from whose snapshot its first span continues; None after that, or without.
        wanted: the numbers of its tokens after which snapshots are to be taken, ascending.
        taken: those of the step under way, each with its slot.
        last: the block with the snapshot of its answer so far.
    """

    source: PrefixNode | None = None
    wanted: list[int] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)
    last: PrefixNode | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A sequence in the engine: its request and its progress.

    Attributes:
        ids: the token ids of the prompt, of the prefix, and those generated since.
        adjusts_logits, can_speculate, can_run_ahead: copies of the properties of `spec`, which are costly to
            compute.
        draft_length: how many tokens may be drafted; None before the first draft.
        acceptance: how many of its drafts were accepted, where drafts have to pay.
        guide_state: the tokens that its guide allows next; None without a guide.
        computed: how many of `ids` have keys and values in the pool, or bring them.
        reported: the highest `computed` so far. A preempted sequence is computed again, but the scores and
            states of its prompt up to here were reported before.
        blocks: its blocks in the pool, in the order of its tokens.
        unread: how many of its first blocks were given back, because no later token reads them.
        cached_path: those of its first blocks that are in the prefix cache.
        is_cacheable: whether its full blocks are put into the prefix cache.
        row: its row in the step's tables while it runs.
        admissions: how often it was admitted; its row's tables are written again after each.
        arrival: its number among all sequences that arrived.
        held: it keeps its row and blocks, but takes part in no step.
        parts: the parts of its prompt that stand for media, or the rows of a fed sequence; None without any.
        adapter: the LoRA adapter that it is computed with; None is the plain model.
        work: the record of its work, which its caller reads.
        fed: the state of a fed sequence (`workers.kv_engine.feeding.sequences.FedState`); None for any other.
        states: what it has of snapshots of recurrent states; None without recurrent states.
        bound_from: its first token whose keys and values depend on the length of its prompt; None if there is
            none so far. It is of nodes with indexers alone.
        rotary_change: the longest sequence with short rotary factors (`workers.kv_engine.node`); None: all.
        long_factors: its keys are computed with the long factors.
    """

    spec: SequenceSpec
    ids: list[int] = field(init=False)
    adjusts_logits: bool = field(init=False)
    can_speculate: bool = field(init=False)
    can_run_ahead: bool = field(init=False)
    draft_length: DraftLength | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    guide_state: GuideState | None = None
    computed: int = 0
    reported: int = 0
    blocks: list[int] = field(default_factory=list)
    unread: int = 0
    cached_path: list[PrefixNode] = field(default_factory=list)
    is_cacheable: bool = False
    row: int | None = None
    admissions: int = 0
    arrival: int = 0
    held: bool = False
    parts: PromptParts | None = None
    fed: object | None = None
    states: "SequenceStates | None" = None
    adapter: "AdapterWeights | None" = None
    bound_from: int | None = None
    rotary_change: int | None = None
    long_factors: bool = field(init=False)
    work: EngineWork = field(init=False)

    def __post_init__(self) -> None:
        self.work = self.spec.work
        self.ids = [*self.spec.prompt_ids, *self.spec.prefix_ids]
        self.long_factors = self.needs_long_factors(len(self.ids))
        self.adjusts_logits = self.spec.adjusts_logits
        self.can_speculate = self.spec.can_speculate
        self.can_run_ahead = self.spec.can_run_ahead
        self.computed = self.imported

    @property
    def imported(self) -> int:
        """The number of tokens whose keys and values come with the request, and can be used."""
        if self.spec.kv is None:
            return 0
        tokens = tokens_in(self.spec.kv.shape)
        if self.needs_long_factors(tokens) is not self.long_factors:
            return 0  # the tokens since then have brought it past the change
        # The last token is always computed here: the next token is sampled from its hidden state.
        return min(tokens, len(self.ids) - 1)

    def needs_long_factors(self, tokens: int) -> bool:
        """Return whether its keys have the long rotary factors when it has so many tokens."""
        return self.rotary_change is not None and tokens > self.rotary_change

    def room_before_change(self, most: int) -> int:
        """Return how many of `most` tokens can be added before all keys have to be computed again."""
        if self.rotary_change is None or self.long_factors:
            return most
        return max(0, min(most, self.rotary_change - len(self.ids)))

    @property
    def outgrows_factors(self) -> bool:
        """True if its keys have short rotary factors, and it is too long for them."""
        return not self.long_factors and self.needs_long_factors(len(self.ids))

    @property
    def shared_root(self) -> Hashable:
        """The root of its path in the prefix cache: keys of short and of long factors are never shared."""
        root = self.spec.shared_root
        return (root, "long factors") if self.long_factors else root

    @property
    def contents(self) -> Items[Hashable]:
        """The content of each token for the prefix cache: equal ones have equal keys and values."""
        return self.ids if self.parts is None else Contents(self.parts.contents, self.ids)

    @property
    def bound(self) -> Bound:
        """What other sequences must have to share its blocks from `bound_from` on."""
        return Bound(len(self.spec.prompt_ids))

    def bind(self, token: int) -> None:
        """Note a token whose keys and values depend on the length of the prompt."""
        self.bound_from = token if self.bound_from is None else min(self.bound_from, token)

    @property
    def needs_prompt_states(self) -> bool:
        """True if its prompt is to be computed here: for scores, pooling or streams, or because it is fed."""
        if self.fed is not None or self.spec.sends:
            return True
        if self.spec.pooling is not None and self.spec.pooling.needs_all:
            return True
        return self.spec.scores_prompt and self.reported < len(self.spec.prompt_ids) - 1

    @property
    def pending(self) -> int:
        """The number of tokens to compute before the next one can be sampled; 1 is a decode."""
        return len(self.ids) - self.computed

    @property
    def generated(self) -> int:
        """The number of generated tokens, the prefix included. It is the index of the next random draw."""
        return len(self.ids) - len(self.spec.prompt_ids)

    @property
    def is_recomputable(self) -> bool:
        """False if it cannot be computed again: its prompt takes rows of media that did not come.

        So it is with a sequence from another rank, which brings keys and values alone.
        """
        return self.parts is None or not self.parts.lacks_rows()

    @property
    def keeps_all(self) -> bool:
        """True if it keeps blocks that no later token reads: they are moved, or cannot be computed again."""
        return self.spec.export is not None or self.spec.kv is not None or self.parts is not None

    @property
    def reserved_tokens(self) -> int:
        """The largest number of tokens that the sequence can ever have."""
        return len(self.spec.prompt_ids) + self.spec.max_tokens


@dataclass(slots=True, eq=False)
class Span:
    """`count` consecutive tokens of a sequence, from position `start` on, that are computed in one step.

    Attributes:
        reported: `Sequence.reported` at the start of the step.
        drafted: how many of the tokens, the last ones, are drafts (`workers.kv_engine.speculative`).
        snapshot: the slot of the recurrent state from which it continues, if that is not its row's own.
        snapshots: numbers of its tokens after which the recurrent state is copied, each with the slot.
    """

    # Not frozen: freezing is slow, one is made per sequence and step, and rejected drafts are cut off.
    sequence: Sequence
    start: int
    count: int
    reported: int = 0
    drafted: int = 0
    snapshot: int | None = None
    snapshots: list[tuple[int, int]] | None = None

    @property
    def is_decode(self) -> bool:
        """True if the span is the last token of its sequence, and its drafts."""
        return self.count == 1 + self.drafted

    @property
    def reaches_end(self) -> bool:
        """True if the span ends with the last token of its sequence."""
        return self.start + self.count == len(self.sequence.ids)

    @property
    def samples(self) -> bool:
        """True if the next token of the sequence is sampled after the span."""
        return self.reaches_end and self.sequence.spec.max_tokens > 0

    @property
    def unreported(self) -> range:
        """The positions in the span that are computed for the first time."""
        end = self.start + self.count
        return range(min(max(self.start, self.reported), end), end)

    @property
    def scored_positions(self) -> range:
        """The positions whose logits give the score of the prompt's next token."""
        spec = self.sequence.spec
        if not spec.scores_prompt:
            return _NO_POSITIONS
        first = max(self.start, self.reported)
        return range(first, min(self.start + self.count, len(spec.prompt_ids) - 1))
