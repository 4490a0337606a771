"""The scheduler: admission, preemption, and the spans of the next step. Imports no torch.

The policy, in order:

1. **Order.** Higher `priority` first; then the earlier deadline; then the tenant that was served least; then
   the earlier arrival.
2. **Admission.** The first sequence is admitted if there is a free row, blocks for all tokens that it has to
   compute, and one more block for each running sequence. No sequence overtakes another for lack of room.
   Cached tokens are not computed again. A sequence that needs a block which another one is computing waits
   for it, and lets others pass.
3. **Steps.** One token of every sequence that decodes; then spans of prompts, up to `max_step_tokens`, and
   next to decodes up to the prefill budget (`prefill_budget`). The prefill budget is ignored in a burst: if
   prompts without it would bring `MIN_BURST` sequences to their first token, and twice as many as decode. A
   burst that is computed in small pieces delays itself.
4. **Preemption.** A sequence allocates blocks as it grows. If none is free, the last sequence by (1) is
   *preempted*: it releases its blocks and waits again, with its tokens. What is still cached of them then is
   not computed again. The first sequence always progresses, so all of them do.

If all layers have a sliding window (`Scheduler.free_before`), a sequence gives back the blocks that no later
token reads, and its prompt gets blocks from step to step: texts may be longer than the pool.

A sequence that grows past the node's change of rotary factors is computed again, like a preempted one: what
is cached of it stays a beginning of short sequences only.

A held sequence takes part in no step and keeps its row and blocks. A sequence that could never fit is
refused. `tests/workers/kv_engine/test_scheduler.py` simulates the scheduler without a model.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from math import inf
from typing import Final

from shared.errors import BugError, ClientError
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.cache.prefix_cache import PrefixCache, PrefixNode
from workers.kv_engine.cache.state_snapshots import StateSnapshots
from workers.kv_engine.counters import CacheCounters
from workers.kv_engine.prefill_budget import PrefillBudget
from workers.kv_engine.prompt_parts import PromptParts
from workers.kv_engine.sampling.mask_throttle import MaskThrottle
from workers.kv_engine.sequence import Sequence, SequenceStates, Span
from workers.threads.engine_work import EngineWork, Lack, Prompts, StepCounts

MIN_BURST: Final = 4
"""The fewest first tokens in one step for which the sequences that decode are slowed down."""


class Scheduler:
    """Admission and batching over one pool.

    Args:
        max_step_tokens: the most tokens of a step. At least `max_sequences`, so that all decodes fit.
        prefix_cache: keep computed blocks for later sequences with the same prefix.
        prefill_budget: limits prompt tokens next to decodes; None is no limit.
        max_part_tokens: how many tokens more a step may have for a full part of a prompt, which is never cut.
        state_snapshots: the slots for snapshots of recurrent states, after one for each sequence; None for a
            node without recurrent states.
        has_bounds: keys and values may depend on the length of a sequence's prompt (`Sequence.bound_from`).
        rotary_change: the longest sequence with short rotary factors (`workers.kv_engine.node`); None: all.

    Attributes:
        barrier: sequences that arrived after this number are not admitted; None admits all. Set while
            something waits for rows and blocks of its own (`reserve`).
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
        max_part_tokens: int = 0,
        state_snapshots: int | None = None,
        has_bounds: bool = False,
        rotary_change: int | None = None,
    ) -> None:
        if max_sequences < 1 or max_step_tokens < max_sequences:
            raise ValueError(
                "expected max_step_tokens >= max_sequences >= 1, "
                f"found max_step_tokens={max_step_tokens}, max_sequences={max_sequences}"
            )
        self.blocks = blocks
        self.cache = PrefixCache(blocks) if prefix_cache else None
        self._snapshots: StateSnapshots | None = None
        if self.cache is not None and state_snapshots is not None:
            self._snapshots = StateSnapshots(range(max_sequences, max_sequences + state_snapshots))
            self.cache.on_forgotten = self._snapshots.drop
        self._has_bounds = has_bounds
        self.prefill_budget = prefill_budget
        self.max_step_tokens = max_step_tokens
        self.max_positions = max_positions
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counters = CacheCounters()
        self.max_sequences = max_sequences
        self._max_uncut_tokens = max_step_tokens + max_part_tokens
        self.barrier: int | None = None
        self._rotary_change = rotary_change
        self._window: int | None = None
        self._reserved_rows = 0
        self._free_rows = deque(range(max_sequences))
        self._arrivals = 0
        self._served: Counter[str] = Counter()
        self._guests: Counter[str] = Counter()
        self._masks = MaskThrottle()
        self._counts = StepCounts()
        self._prompts = Prompts(self._counts)

    @property
    def has_work(self) -> bool:
        """True if a step would compute or admit a sequence."""
        if any(not sequence.held for sequence in self.running):
            return True
        able = self._before_barrier()
        return bool(able) and self._admission_path(min(able, key=self._order)) is not None

    @property
    def can_admit(self) -> bool:
        """True if a waiting sequence could be admitted now."""
        for sequence in sorted(self._before_barrier(), key=self._order):
            path = self._cached(sequence)
            if self._computed_by(sequence, path) is None:
                return self._fits(sequence, path)
        return False

    @property
    def window(self) -> int | None:
        """The window before which blocks are given back; None if all are kept."""
        return self._window

    def free_before(self, window: int) -> None:
        """Let sequences give back the blocks before the last `window` tokens; no layer reads them.

        Nothing changes in a pool that is too small for a window beside the tokens of a step.
        """
        # A block that is read in part, and one for the next token.
        if self.blocks.blocks_for(window + self._max_uncut_tokens) + 2 > self.blocks.num_blocks:
            return
        self._window = window
        if self.cache is not None:
            self.cache.frees_beginnings = True

    def check_length(self, prompt_tokens: int, max_tokens: int, *, keeps_all: bool = True) -> None:
        """Check that a prompt and its answer can ever fit; `keeps_all`: with all blocks at once.

        Raises:
            ClientError: they exceed the model's context or the pool.
        """
        limit, what = min(
            (self.max_positions, "the model's context length"),
            (self.blocks.capacity_tokens, "the size of the KV cache"),
        )
        if self._window is not None and not keeps_all:
            limit, what = self.max_positions, "the model's context length"
        if prompt_tokens + max_tokens > limit:
            raise ClientError(
                f"{what} is {limit} tokens, but {prompt_tokens + max_tokens} were requested "
                f"({prompt_tokens} in the prompt, {max_tokens} for the answer); shorten the prompt or "
                "max_tokens",
                code="context_length_exceeded",
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ClientError: it can never fit the model's context or the pool.
        """
        spec = sequence.spec
        self.check_length(len(spec.prompt_ids), spec.max_tokens, keeps_all=sequence.keeps_all)
        if sequence.parts is not None:
            self._check_parts(sequence.parts)
        sequence.arrival = self.next_arrival()
        self._count_in(sequence.spec.tenant)
        self.waiting.append(sequence)

    def _check_parts(self, parts: PromptParts) -> None:
        """Refuse a full part that no step can compute beside as many decodes as there may be."""
        limit = self._max_uncut_tokens - self.max_sequences
        if parts.longest_full > limit:
            raise ClientError(
                f"{parts.longest_full} tokens of the prompt see one another, so one step has to compute "
                f"them, and it computes {limit} at most: use smaller images or a shorter prompt, or raise "
                "model_kwargs.max_pass_tokens",
                code="context_length_exceeded",
            )

    def next_arrival(self) -> int:
        """Return the number of an arrival, from 1."""
        self._arrivals += 1
        return self._arrivals

    def can_reserve(self, rows: int, blocks: int) -> bool:
        """True if so many rows and blocks are free, besides one block for each running sequence."""
        return rows <= len(self._free_rows) and blocks + len(self.running) <= self.blocks.free

    def reserve(self, rows: int, blocks: int) -> tuple[list[int], list[int]]:
        """Take rows and blocks that belong to no sequence of the scheduler, until `release`."""
        self._reserved_rows += rows
        return [self._free_rows.popleft() for _ in range(rows)], self.blocks.allocate(blocks)

    def release(self, rows: Items[int], blocks: Items[int]) -> None:
        """Give back what `reserve` returned."""
        self._reserved_rows -= len(rows)
        self._free_rows.extend(rows)
        self.blocks.release(blocks)

    def enter(self, tenant: str) -> None:
        """Note that a tenant has work outside of the scheduler's sequences; it counts as present."""
        self._count_in(tenant)
        self._guests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Note that one such piece of work has ended."""
        self._guests[tenant] -= 1
        if not self._guests[tenant]:
            del self._guests[tenant]

    def served(self, tenant: str) -> int:
        """The number of tokens that were computed for a tenant."""
        return self._served[tenant]

    def count_served(self, tenant: str, tokens: int) -> None:
        """Count tokens that were computed for a tenant outside of its sequences."""
        self._served[tenant] += tokens

    def schedule(self) -> list[Span]:
        """Admit sequences, allocate blocks, and return the spans of the next step: decodes first."""
        if self._rotary_change is not None:
            self._change_factors()
        self._admit()
        self._grow()
        decodes: list[Span] = []
        prompts: list[Sequence] = []
        able = [sequence for sequence in self.running if not sequence.held]
        left_out = self._masks.left_out(able, lambda sequence: self._served[sequence.spec.tenant])
        for sequence in able:
            if sequence in left_out:
                continue
            pending = len(sequence.ids) - sequence.computed
            if pending == 1:
                decodes.append(Span(sequence, sequence.computed, 1, sequence.reported))
            elif pending > 1:
                prompts.append(sequence)
        spans = decodes + self._prefills(prompts, len(decodes)) if prompts else decodes
        if self._snapshots is not None:
            for span in spans:
                self._place_states(self._snapshots, span)
        return spans

    def allocate_spare(self, sequence: Sequence, tokens: int) -> int:
        """Allocate spare blocks for up to `tokens` more tokens; return for how many there is room.

        Blocks that the running sequences need for their next tokens are not spare.
        """
        size = self.blocks.block_size
        missing = self.blocks.blocks_for(len(sequence.ids) + tokens) - len(sequence.blocks)
        spare = self.blocks.free - len(self.running)
        if missing > 0 and spare > 0:
            sequence.blocks += self.blocks.allocate(min(missing, spare))
        return min(tokens, len(sequence.blocks) * size - len(sequence.ids))

    def advance(self, spans: Items[Span], took_s: float = 0.0, passes: Items[tuple[str, int]] = ()) -> None:
        """Note that the spans were computed: their keys and values are in the pool.

        Args:
            spans: the spans of a step that was computed.
            took_s: the duration of the step.
            passes: the keys and tokens of the passes of programs in the same step.
        """
        size, served = self.blocks.block_size, self._served
        self._counts.steps += 1
        self._counts.rows += len(spans) + len(passes)
        prompts, ended = list(passes), list[Sequence]()
        for span in spans:
            sequence = span.sequence
            if span.count > 1 and not span.is_decode:
                prompts.append((sequence.spec.key, span.count))
                if span.reaches_end and not sequence.work.eviction_count:
                    ended.append(sequence)
            sequence.computed = computed = sequence.computed + span.count
            sequence.reported = max(sequence.reported, computed)
            served[sequence.spec.tenant] += span.count
            if sequence.is_cacheable and computed // size > len(sequence.cached_path):
                self._cache_blocks(sequence)
            if self._window is not None and sequence.row is not None:
                self._free_unread(sequence)
            if self._snapshots is not None:
                self._keep_states(self._snapshots, sequence)
        if prompts:
            self._prompts.add(took_s, prompts)
            for sequence in ended:
                sequence.work.decode(self._counts)

    def end_work(self, key: str, work: EngineWork) -> None:
        """Complete the record of a sequence, or of a run of a program, that leaves the engine."""
        self._prompts.note_beside(key, work)
        work.end()

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many of a sequence's first tokens are in the prefix cache."""
        if self.cache is None:
            return 0
        path = self._reusable(sequence, [*sequence.contents, 0])  # the last is never matched
        return len(path) * self.blocks.block_size

    def hide_from_cache(self, sequence: Sequence) -> None:
        """Remove the blocks of a sequence from the prefix cache: their contents may be wrong."""
        if self.cache is not None and sequence.cached_path:
            self.cache.hide(sequence.cached_path[0])

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished, failed or cancelled sequence, and free its blocks and row."""
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._evict(sequence)
        self.end_work(sequence.spec.key, sequence.work)

    # ---- order -------------------------------------------------------------------------------------
    def _order(self, sequence: Sequence) -> tuple[float, float, int, int]:
        spec = sequence.spec
        deadline = inf if spec.deadline_ns is None else spec.deadline_ns
        return (-spec.priority, deadline, self._served[spec.tenant], sequence.arrival)

    def _count_in(self, tenant: str) -> None:
        """Raise the served count of a returning tenant to the lowest of those present."""
        present = {sequence.spec.tenant for sequence in (*self.running, *self.waiting)} | {*self._guests}
        if not present:
            self._served.clear()
        elif tenant not in present:
            self._served[tenant] = max(self._served[tenant], min(self._served[other] for other in present))

    # ---- admission ---------------------------------------------------------------------------------
    def _admit(self) -> None:
        ordered = sorted(self._before_barrier(), key=self._order)
        for place, sequence in enumerate(ordered):
            path = self._cached(sequence)
            if (by := self._computed_by(sequence, path)) is not None:
                sequence.work.wait_for("prefix", [by.spec.key])
                continue
            if not self._fits(sequence, path):
                self._note_waits("kv_blocks" if self._free_rows else "places", ordered[place:])
                break
            self._admit_one(sequence, path)
        if self.waiting and not self.running and not self._reserved_rows and self.barrier is None:
            raise BugError("the pool is idle, but its first waiting sequence does not fit")

    def _note_waits(self, lack: Lack, waiting: Items[Sequence]) -> None:
        """Record what sequences wait for, and behind whom, unless that is known."""
        if all(sequence.work.lacked for sequence in waiting):
            return
        behind = [sequence.spec.key for sequence in self.running]
        for sequence in waiting:
            sequence.work.wait_for(lack, behind)
            behind.append(sequence.spec.key)

    def _before_barrier(self) -> list[Sequence]:
        if self.barrier is None:
            return self.waiting
        return [sequence for sequence in self.waiting if sequence.arrival < self.barrier]

    def _admission_path(self, sequence: Sequence) -> list[PrefixNode] | None:
        """Return the cached path of a sequence that could be admitted now; None if it could not."""
        path = self._cached(sequence)
        return path if self._fits(sequence, path) else None

    def _cached(self, sequence: Sequence) -> list[PrefixNode]:
        """Return the cached path of a sequence; none if it imports its own or needs its prompt's states."""
        if self.cache is None or sequence.computed or sequence.needs_prompt_states:
            return []
        return self._reusable(sequence, sequence.contents)

    def _reusable(self, sequence: Sequence, contents: Items[Hashable]) -> list[PrefixNode]:
        """Return the cached path of contents: with recurrent states, up to its last snapshot."""
        assert self.cache is not None
        bound = sequence.bound if self._has_bounds else None
        path = self.cache.match(contents, sequence.shared_root, bound=bound)
        return path if self._snapshots is None else self._snapshots.usable(path)

    def _computed_by(self, sequence: Sequence, path: list[PrefixNode]) -> Sequence | None:
        """Return the sequence that is computing the block which this one needs next; None if none is."""
        if self.cache is None or sequence.computed or sequence.needs_prompt_states:
            return None
        if self._snapshots is not None:  # most blocks end without a snapshot: waiting would gain nothing
            return None
        if len(path) >= (len(sequence.ids) - 1) // self.blocks.block_size:
            return None
        end = self._cache_end(self.cache, sequence, path)
        by = end.computing.get(self.cache.content(sequence.contents, len(path)))
        return by if isinstance(by, Sequence) and not by.held else None

    def _fits(self, sequence: Sequence, path: list[PrefixNode]) -> bool:
        if not self._free_rows:
            return False
        read = path[self._unread(sequence, len(path) * self.blocks.block_size) :]
        evictable = sum(self.blocks.is_evictable(node.block) for node in read)
        needed = self._first_blocks(sequence, path) - len(path)
        return needed + len(self.running) <= self.blocks.free - evictable

    def _first_blocks(self, sequence: Sequence, path: Items[PrefixNode]) -> int:
        """Return how many blocks a sequence gets at its admission.

        One that cannot be computed again gets all that it may need, because it is never preempted.
        """
        if not sequence.is_recomputable:
            return self.blocks.blocks_for(sequence.reserved_tokens)
        return self.blocks.blocks_for(self._next_tokens(sequence, len(path) * self.blocks.block_size))

    def _next_tokens(self, sequence: Sequence, computed: int) -> int:
        """Return for how many tokens a sequence needs blocks in the step after `computed` tokens."""
        tokens = len(sequence.ids)
        if self._window is None or sequence.keeps_all:
            return tokens
        return min(tokens, computed + self._max_uncut_tokens)

    def _unread(self, sequence: Sequence, computed: int) -> int:
        """Return how many of its first blocks no token of a sequence reads after `computed` tokens."""
        if self._window is None or sequence.keeps_all:
            return 0
        size = self.blocks.block_size
        # The last full block stays: the cache continues after it.
        return max(0, min((computed + 1 - self._window) // size, computed // size - 1))

    def _free_unread(self, sequence: Sequence) -> None:
        """Give back the blocks that no later token of a sequence reads; their numbers stay in its table."""
        unread = self._unread(sequence, sequence.computed)
        if unread > sequence.unread:
            self.blocks.release(sequence.blocks[sequence.unread : unread])
            self.counters.unread_blocks += unread - sequence.unread
            sequence.unread = unread

    def _admit_one(self, sequence: Sequence, path: list[PrefixNode]) -> None:
        self.waiting.remove(sequence)
        shared = [node.block for node in path]
        sequence.unread = self._unread(sequence, len(path) * self.blocks.block_size)
        self.blocks.share(shared[sequence.unread :])
        own = self.blocks.allocate(self._first_blocks(sequence, path) - len(path))
        sequence.blocks, sequence.cached_path = shared + own, path
        sequence.is_cacheable = self.cache is not None and sequence.fed is None
        sequence.row = self._free_rows.popleft()
        sequence.admissions += 1
        self.counters.queries += len(sequence.ids)
        self.counters.hits += len(path) * self.blocks.block_size
        if path:
            sequence.computed = len(path) * self.blocks.block_size
        if self._has_bounds:
            self._find_bound(sequence)
        sequence.work.take_place(self._counts)
        sequence.work.admit(cached=len(path) * self.blocks.block_size, computed=sequence.computed)
        if self._snapshots is not None:
            self._want_states(self._snapshots, sequence)
        self.running.append(sequence)
        self._announce(sequence)

    def _find_bound(self, sequence: Sequence) -> None:
        """Note from where on an admitted sequence shares, or brings, what its prompt's length may decide."""
        if sequence.imported:
            sequence.bind(0)  # another engine knows where
        bound = (number for number, node in enumerate(sequence.cached_path) if node.is_bound)
        if (first := next(bound, None)) is not None:
            sequence.bind(first * self.blocks.block_size)

    def _evict(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        sequence.work.leave_place()
        self._withdraw(sequence)
        if self._snapshots is not None:
            self._leave_states(self._snapshots, sequence)
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks[sequence.unread :])
        self._free_rows.append(sequence.row)
        sequence.blocks, sequence.cached_path, sequence.row = [], [], None
        sequence.unread = 0

    # ---- growth and preemption ---------------------------------------------------------------------
    def _grow(self) -> None:
        """Allocate a block for each sequence whose next token needs one; preempt the last if none is free."""
        size = self.blocks.block_size
        missing = {
            sequence: max(0, self._next_blocks(sequence) - len(sequence.blocks))
            for sequence in self.running
            if len(sequence.ids) > len(sequence.blocks) * size and not sequence.held
        }
        scarce = sum(missing.values()) > self.blocks.free
        for sequence in sorted(missing, key=self._order) if scarce else missing:
            while sequence.row is not None and missing[sequence] > self.blocks.free:
                able = (one for one in self.running if one.is_recomputable)
                self._preempt(max(able, key=self._order), by=sequence)
            if sequence.row is not None:
                sequence.blocks += self.blocks.allocate(missing[sequence])

    def _next_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks a running sequence needs for its next step."""
        return self.blocks.blocks_for(self._next_tokens(sequence, sequence.computed))

    def _preempt(self, sequence: Sequence, by: Sequence) -> None:
        if sequence is by:  # the last one itself needs a block: the first one keeps its own
            by = min(self.running, key=self._order)
        sequence.work.evict(by.spec.key, sequence.computed)
        self._evict(sequence)
        sequence.computed = sequence.imported
        self.waiting.append(sequence)
        self.counters.preemptions += 1

    def _change_factors(self) -> None:
        """Let the sequences that have grown past the change of rotary factors be computed again."""
        for sequence in [one for one in self.running if one.outgrows_factors and not one.held]:
            self._evict(sequence)
            sequence.long_factors, sequence.computed = True, 0
            self.waiting.append(sequence)
            self.counters.changed_factors += 1

    # ---- the prefix cache --------------------------------------------------------------------------
    def _cache_blocks(self, sequence: Sequence) -> None:
        """Put the full blocks of a sequence into the prefix cache."""
        assert self.cache is not None
        self._withdraw(sequence)
        while len(sequence.cached_path) < sequence.computed // self.blocks.block_size:
            number = len(sequence.cached_path)
            content = self.cache.content(sequence.contents, number)
            if (
                sequence.bound_from is not None
                and sequence.bound_from < (number + 1) * self.blocks.block_size
            ):
                content = (*content, sequence.bound)
            end = self._cache_end(self.cache, sequence, sequence.cached_path)
            node = self.cache.insert(end, content, sequence.blocks[number])
            if node is None:  # an equal block was cached meanwhile: later blocks belong after that one
                if self._snapshots is None:
                    sequence.is_cacheable = False
                    return
                node = self._exchange_block(self.cache, sequence, number)
            sequence.cached_path.append(node)
        self._announce(sequence)

    def _exchange_block(self, cache: PrefixCache, sequence: Sequence, number: int) -> PrefixNode:
        """Give a sequence the cached block that is equal to one of its own; return its node.

        With recurrent states this is common: blocks are computed again where they end without a snapshot.
        """
        end = self._cache_end(cache, sequence, sequence.cached_path)
        node = end.children[cache.content(sequence.contents, number)]
        self.blocks.share([node.block])
        self.blocks.release([sequence.blocks[number]])
        sequence.blocks[number] = node.block
        sequence.admissions += 1  # its row's table is written again
        return node

    # ---- snapshots of recurrent states -------------------------------------------------------------
    def _want_states(self, snapshots: StateSnapshots, sequence: Sequence) -> None:
        """Note from which snapshot an admitted sequence continues, and where it takes its own."""
        size, states = self.blocks.block_size, SequenceStates()
        sequence.states = states
        if sequence.cached_path:
            states.source = sequence.cached_path[-1]
            snapshots.pin(states.source)
        if not sequence.is_cacheable:
            return
        assert self.cache is not None
        known = self.cache.match(sequence.contents, sequence.shared_root)
        ends = {len(known) * size, (len(sequence.ids) - 1) // size * size}
        states.wanted = sorted(end for end in ends if end > sequence.computed)

    def _place_states(self, snapshots: StateSnapshots, span: Span) -> None:
        """Give a span the slots from which its state comes, and to which it is copied."""
        sequence, size, end = span.sequence, self.blocks.block_size, span.start + span.count
        states = sequence.states
        assert states is not None, "set at the admission"
        if states.source is not None:
            span.snapshot = snapshots.slot(states.source)
        wanted = [at for at in states.wanted if at <= end]
        states.wanted = states.wanted[len(wanted) :]
        if sequence.is_cacheable and span.count == 1 and end % size == 0 and end not in wanted:
            wanted.append(end)
        for at in wanted:
            slot = snapshots.take()
            if slot is not None:
                states.taken.append((at, slot))
        span.snapshots = [(at - span.start, slot) for at, slot in states.taken]

    def _keep_states(self, snapshots: StateSnapshots, sequence: Sequence) -> None:
        """Keep the snapshots that a sequence took in the step, at the blocks which are cached by now."""
        states = sequence.states
        assert states is not None, "set at the admission"
        if states.source is not None:
            snapshots.unpin(states.source)
            states.source = None
        for at, slot in states.taken:
            number = at // self.blocks.block_size
            if number > len(sequence.cached_path):
                snapshots.give_back(slot)
                continue
            node = sequence.cached_path[number - 1]
            snapshots.keep(node, slot)
            if at >= len(sequence.spec.prompt_ids):  # of the answer, only the last one is kept
                if states.last is not None:
                    snapshots.drop(states.last)
                states.last = node
        states.taken = []

    @staticmethod
    def _leave_states(snapshots: StateSnapshots, sequence: Sequence) -> None:
        """Give back what a sequence that leaves its row has of snapshots."""
        states, sequence.states = sequence.states, None
        assert states is not None, "set at the admission"
        if states.source is not None:
            snapshots.unpin(states.source)
        for _, slot in states.taken:
            snapshots.give_back(slot)

    def _announce(self, sequence: Sequence) -> None:
        """Note in the cache which block a sequence computes next, if its content is known."""
        number = len(sequence.cached_path)
        if sequence.is_cacheable and number < len(sequence.ids) // self.blocks.block_size:
            assert self.cache is not None
            end = self._cache_end(self.cache, sequence, sequence.cached_path)
            end.computing.setdefault(self.cache.content(sequence.contents, number), sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        if self.cache is None or not sequence.is_cacheable:
            return
        end = self._cache_end(self.cache, sequence, sequence.cached_path)
        content = self.cache.content(sequence.contents, len(sequence.cached_path))
        if end.computing.get(content) is sequence:
            del end.computing[content]

    @staticmethod
    def _cache_end(cache: PrefixCache, sequence: Sequence, path: list[PrefixNode]) -> PrefixNode:
        """Return the cache node after which a sequence's next block is inserted."""
        return path[-1] if path else cache.root(sequence.shared_root)

    # ---- spans of prompts --------------------------------------------------------------------------
    def _prefills(self, prompts: list[Sequence], decodes: int) -> list[Span]:
        """Return the spans of prompts for a step with so many decodes."""
        prompts.sort(key=self._order)
        # There are at most `max_sequences` decodes, and `max_step_tokens` covers them: only prompts are cut.
        budget = self.max_step_tokens - decodes
        limit = self._max_uncut_tokens - decodes
        if self.prefill_budget is None:
            return _cut(prompts, budget, limit)
        budget = min(budget, self.prefill_budget.max_tokens())
        spans = _cut(prompts, budget, limit)
        firsts = sum(span.reaches_end for span in spans)
        if not decodes or firsts >= max(MIN_BURST, 2 * decodes):
            return spans
        budget = min(budget, self.prefill_budget.tokens_with_decodes(decodes, len(prompts)))
        return _cut(prompts, budget, limit)


def _cut(prompts: Iterable[Sequence], budget: int, limit: int) -> list[Span]:
    """Return spans of the first prompts: at most `budget` tokens in total, or a full part within `limit`."""
    spans: list[Span] = []
    for sequence in prompts:
        if budget <= 0:
            break
        count = min(sequence.pending, budget)
        if sequence.parts is not None:
            count = _uncut(sequence.parts, sequence.computed, count, limit)
            if not count:
                continue
        budget -= count
        limit -= count
        spans.append(Span(sequence, sequence.computed, count, sequence.reported))
    return spans


def _uncut(parts: PromptParts, start: int, count: int, limit: int) -> int:
    """Return how many of `count` tokens to compute so that no full part is cut; it may be more, or none."""
    whole = parts.whole(start, count)
    if whole:
        return whole
    rest = parts.rest_of_part(start)
    return rest if rest <= limit else 0
