"""The scheduler: who takes part in the next step.

The policy, in order:

1. **Who is first.** Higher `priority`; then the earlier deadline; then the tenant that was served least; then
   who came first.
2. **Who gets in.** Whoever is first, while there are a row and blocks for all that it has to compute, and a
   block for each that runs already. Nobody overtakes for want of room. What the prefix cache has is not
   computed again; who wants what another is just computing waits for it, and lets others pass.
3. **What a step is.** One token of every sequence that decodes; then spans of prompts within the budget of
   `max_step_tokens`, beside decodes no more than their pace allows (`prefill_budget`). But where prompts
   without that limit would bring `MIN_BURST` sequences to their first token, and twice as many as decode,
   they
   are not held to it: a crowd that is let in by a few tokens a step keeps itself waiting.
4. **When blocks run out.** A sequence takes blocks as it grows. When there is none left, who is last by (1)
   is *preempted*: it gives its blocks back and waits again, with its tokens; what the prefix cache still has
   of them then is not computed again. The first one always gets on, so all do.

A sequence that is held takes part in no step and keeps what it has. One that could never fit is refused.
No torch here: `tests/workers/kv_engine/test_scheduler.py` simulates it without a model.
"""

from collections import Counter, deque
from collections.abc import Iterable
from math import inf
from typing import Final

from shared.errors import BugError, ClientError
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.cache.prefix_cache import PrefixCache, PrefixNode
from workers.kv_engine.counters import CacheCounters
from workers.kv_engine.prefill_budget import PrefillBudget
from workers.kv_engine.sequence import Sequence, Span

MIN_BURST: Final = 4
"""So many first tokens in one step are worth a pause of those who have theirs."""


class Scheduler:
    """Admission and batching over one pool.

    Args:
        blocks: the pool's blocks.
        max_sequences: how many sequences may run at once.
        max_step_tokens: the budget of a step. At least `max_sequences`, so that a prompt always gets on
            beside the sequences that decode.
        max_positions: the model's context length.
        prefix_cache: whether what was computed is kept for others that begin with the same.
        pace: how much of prompts is computed beside decodes; None is as much as the budget has.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_sequences: int,
        max_step_tokens: int,
        max_positions: int,
        prefix_cache: bool = True,
        prefill_budget: PrefillBudget | None = None,
    ) -> None:
        if max_sequences < 1 or max_step_tokens < max_sequences:
            raise ValueError(
                f"max_step_tokens must be at least max_sequences, and that at least 1; "
                f"found max_step_tokens={max_step_tokens}, max_sequences={max_sequences}"
            )
        self.blocks = blocks
        self.cache = PrefixCache(blocks) if prefix_cache else None
        self.prefill_budget = prefill_budget
        self.max_step_tokens = max_step_tokens
        self.max_positions = max_positions
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = CacheCounters()
        self._free_rows = deque(range(max_sequences))
        self._arrivals = 0
        self._served: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or admit anybody."""
        return any(not sequence.held for sequence in self.running) or (
            bool(self.waiting) and self._seat_of(min(self.waiting, key=self._order)) is not None
        )

    @property
    def admits(self) -> bool:
        """Whether anybody who waits could be let in now."""
        for sequence in sorted(self.waiting, key=self._order):
            path = self._cached(sequence)
            if not self._is_computed_now(sequence, path):
                return self._fits(sequence, path)
        return False

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ClientError: it can never run here.
        """
        limit, what = min(
            (self.max_positions, "the model's context length"),
            (self.blocks.capacity_tokens, "the size of the KV cache"),
        )
        if sequence.reserved_tokens > limit:
            raise ClientError(
                f"{what} is {limit} tokens, but {sequence.reserved_tokens} were requested "
                f"({len(sequence.spec.prompt_ids)} in the prompt, {sequence.spec.max_tokens} for the "
                "answer); shorten the prompt or max_tokens",
                code="context_length_exceeded",
            )
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._welcome(sequence.spec.tenant)
        self.waiting.append(sequence)

    def schedule(self) -> list[Span]:
        """Admit who fits, make room for who grows, and choose the next step's spans: decodes first."""
        self._admit()
        self._grow()
        decodes: list[Span] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.held:
                continue
            pending = len(sequence.ids) - sequence.computed
            if pending == 1:
                decodes.append(Span(sequence, sequence.computed, 1, sequence.reported))
            elif pending > 1:
                prompts.append(sequence)
        return decodes + self._prefills(prompts, len(decodes)) if prompts else decodes

    def allocate_spare(self, sequence: Sequence, tokens: int) -> int:
        """How many of so many tokens more a sequence has room for, of blocks nobody needs now."""
        size = self.blocks.block_size
        missing = self.blocks.blocks_for(len(sequence.ids) + tokens) - len(sequence.blocks)
        spare = self.blocks.free - len(self.running)
        if missing > 0 and spare > 0:
            sequence.blocks += self.blocks.allocate(min(missing, spare))
        return min(tokens, len(sequence.blocks) * size - len(sequence.ids))

    def advance(self, spans: Iterable[Span]) -> None:
        """The spans are in the pool."""
        size, served = self.blocks.block_size, self._served
        for span in spans:
            sequence = span.sequence
            sequence.computed = computed = sequence.computed + span.count
            sequence.reported = max(sequence.reported, computed)
            served[sequence.spec.tenant] += span.count
            if sequence.is_cacheable and computed // size > len(sequence.cached_path):
                self._keep(sequence)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Of how many of a sequence's first tokens keys and values are kept now, for all that begin alike."""
        if self.cache is None:
            return 0
        path = self.cache.match([*sequence.ids, 0], sequence.spec.cache_root)  # of which the last is never
        return len(path) * self.blocks.block_size

    def hide_from_cache(self, sequence: Sequence) -> None:
        """Have nobody begin with what was computed of a sequence."""
        if self.cache is not None and sequence.cached_path:
            self.cache.hide(sequence.cached_path[0])

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence: finished, failed or cancelled; its blocks and its row are free again."""
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._unseat(sequence)

    # ---- who is first ------------------------------------------------------------------------------
    def _order(self, sequence: Sequence) -> tuple[float, float, int, int]:
        spec = sequence.spec
        deadline = inf if spec.deadline_ns is None else spec.deadline_ns
        return (-spec.priority, deadline, self._served[spec.tenant], sequence.arrival)

    def _welcome(self, tenant: str) -> None:
        """A tenant that was away begins where the others are: nobody saves up service."""
        here = {sequence.spec.tenant for sequence in (*self.running, *self.waiting)}
        if not here:
            self._served.clear()
        elif tenant not in here:
            self._served[tenant] = max(self._served[tenant], min(self._served[other] for other in here))

    # ---- who gets in -------------------------------------------------------------------------------
    def _admit(self) -> None:
        for sequence in sorted(self.waiting, key=self._order):
            path = self._cached(sequence)
            if self._is_computed_now(sequence, path):
                continue
            if not self._fits(sequence, path):
                break
            self._seat(sequence, path)
        if self.waiting and not self.running:
            raise BugError("the pool is idle, and yet its first sequence does not fit")

    def _seat_of(self, sequence: Sequence) -> list[PrefixNode] | None:
        """What is cached of a sequence that could be let in now; None of one that could not."""
        path = self._cached(sequence)
        return path if self._fits(sequence, path) else None

    def _cached(self, sequence: Sequence) -> list[PrefixNode]:
        """What the cache has of a sequence; nothing of one that brings its own or tells of all its prompt."""
        if self.cache is None or sequence.computed or sequence.needs_prompt_states:
            return []
        return self.cache.match(sequence.ids, sequence.spec.cache_root)

    def _is_computed_now(self, sequence: Sequence, path: list[PrefixNode]) -> bool:
        """Whether another is computing the block that this one needs next."""
        if self.cache is None or sequence.computed or sequence.needs_prompt_states:
            return False
        if len(path) >= (len(sequence.ids) - 1) // self.blocks.block_size:
            return False
        by = self._end(self.cache, sequence, path).computing.get(self.cache.content(sequence.ids, len(path)))
        return isinstance(by, Sequence) and not by.held

    def _fits(self, sequence: Sequence, path: list[PrefixNode]) -> bool:
        if not self._free_rows:
            return False
        kept = sum(self.blocks.is_evictable(node.block) for node in path)
        needed = self.blocks.blocks_for(len(sequence.ids)) - len(path)
        return needed + len(self.running) <= self.blocks.free - kept

    def _seat(self, sequence: Sequence, path: list[PrefixNode]) -> None:
        self.waiting.remove(sequence)
        shared = [node.block for node in path]
        self.blocks.share(shared)
        own = self.blocks.allocate(self.blocks.blocks_for(len(sequence.ids)) - len(path))
        sequence.blocks, sequence.cached_path = shared + own, path
        sequence.is_cacheable = self.cache is not None
        sequence.row = self._free_rows.popleft()
        sequence.admissions += 1
        self.counters.queries += len(sequence.ids)
        self.counters.hits += len(path) * self.blocks.block_size
        if path:
            sequence.computed = len(path) * self.blocks.block_size
        self.running.append(sequence)
        self._announce(sequence)

    def _unseat(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._silence(sequence)
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        self._free_rows.append(sequence.row)
        sequence.blocks, sequence.cached_path, sequence.row = [], [], None

    # ---- who grows ---------------------------------------------------------------------------------
    def _grow(self) -> None:
        """A block for each that decodes past its last one; who is last gives way where there is none."""
        size = self.blocks.block_size
        growing = [s for s in self.running if len(s.ids) > len(s.blocks) * size and not s.held]
        for sequence in sorted(growing, key=self._order) if len(growing) > self.blocks.free else growing:
            while sequence.row is not None and not self.blocks.free:
                self._preempt(max(self.running, key=self._order))
            if sequence.row is not None:
                sequence.blocks += self.blocks.allocate(1)

    def _preempt(self, sequence: Sequence) -> None:
        self._unseat(sequence)
        sequence.computed = sequence.imported
        self.waiting.append(sequence)
        self.counters.preemptions += 1

    # ---- what is kept ------------------------------------------------------------------------------
    def _keep(self, sequence: Sequence) -> None:
        """Cache the blocks of a sequence that are full now."""
        assert self.cache is not None
        self._silence(sequence)
        while len(sequence.cached_path) < sequence.computed // self.blocks.block_size:
            number = len(sequence.cached_path)
            node = self.cache.insert(
                self._end(self.cache, sequence, sequence.cached_path),
                self.cache.content(sequence.ids, number),
                sequence.blocks[number],
            )
            if node is None:  # another was as quick: what follows is cached behind its block, not behind ours
                sequence.is_cacheable = False
                return
            sequence.cached_path.append(node)
        self._announce(sequence)

    def _announce(self, sequence: Sequence) -> None:
        """Say which block it computes next, of those it knows the content of."""
        number = len(sequence.cached_path)
        if sequence.is_cacheable and number < len(sequence.ids) // self.blocks.block_size:
            assert self.cache is not None
            end = self._end(self.cache, sequence, sequence.cached_path)
            end.computing.setdefault(self.cache.content(sequence.ids, number), sequence)

    def _silence(self, sequence: Sequence) -> None:
        if self.cache is None or not sequence.is_cacheable:
            return
        end = self._end(self.cache, sequence, sequence.cached_path)
        content = self.cache.content(sequence.ids, len(sequence.cached_path))
        if end.computing.get(content) is sequence:
            del end.computing[content]

    @staticmethod
    def _end(cache: PrefixCache, sequence: Sequence, path: list[PrefixNode]) -> PrefixNode:
        """What a sequence's next block is cached behind, if these are before it."""
        return path[-1] if path else cache.root(sequence.spec.cache_root)

    # ---- prompts -----------------------------------------------------------------------------------
    def _prefills(self, prompts: list[Sequence], decodes: int) -> list[Span]:
        """The spans of prompts beside so many decodes."""
        prompts.sort(key=self._order)
        # There are never more decodes than rows, and the budget covers the rows: only prompts are cut.
        budget = self.max_step_tokens - decodes
        if self.prefill_budget is None:
            return _cut(prompts, budget)
        budget = min(budget, self.prefill_budget.max_tokens())
        spans = _cut(prompts, budget)
        firsts = sum(span.reaches_end for span in spans)
        if not decodes or firsts >= max(MIN_BURST, 2 * decodes):
            return spans
        return _cut(prompts, min(budget, self.prefill_budget.tokens_with_decodes(decodes, len(prompts))))


def _cut(prompts: Iterable[Sequence], budget: int) -> list[Span]:
    """Spans of so many tokens in all, of those who come first."""
    spans: list[Span] = []
    for sequence in prompts:
        if budget == 0:
            break
        count = min(sequence.pending, budget)
        budget -= count
        spans.append(Span(sequence, sequence.computed, count, sequence.reported))
    return spans
