"""A draft model: a smaller model that drafts tokens for the served one, with its own pool.

It keeps each sequence as far as it has computed it, and computes again what the served model did not accept.
Each draft is sampled with the random numbers that the served model will use for this token. So if the two
models agree on the probabilities, they mostly agree on the token.
"""

from collections import deque
from collections.abc import Sequence as Items
from typing import Final

import torch

from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION, attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.gpu.token_sampler import sample
from workers.kv_engine.node import KVNode, rotary_change_of
from workers.kv_engine.sampling.sampler import NOT_A_TOKEN, node_key
from workers.kv_engine.selfcheck import check_node
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.step import StepBuilder


class DraftModel:
    """Drafts by `node` for the served node named `served` (a `proposer.Proposer`).

    Its pool has as many blocks as the served model's, so every sequence fits. `kernel` attends over it, as in
    `PagedPool.of`.
    """

    def __init__(
        self,
        node: KVNode,
        *,
        served: str,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        max_step_tokens: int,
        kernel: AttentionKernel | None = None,
    ) -> None:
        self.node: Final = node
        self._blocks = BlockManager(num_blocks, block_size)
        self._budget = max_step_tokens
        self._builder = StepBuilder(
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_blocks=min(num_blocks, self._blocks.blocks_for(node.max_positions)),
            block_size=block_size,
            device=node.device,
            has_indexers=node.layout.has_indexers,
            has_long_factors=rotary_change_of(node) is not None,
        )
        self._pool = PagedPool.of(node, slots=self._blocks.capacity_tokens, kernel=kernel)
        self._key = node_key(served)
        self._rows = deque(range(max_sequences))
        self._sequences: dict[str, Sequence] = {}
        node.use_attention(ATTENTION)
        check_node(node, kernel)

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[list[int]]:
        own_sequences = [self._catch_up(one, count) for one, count in zip(sequences, most, strict=True)]
        left = {
            id(own): count
            for own, count in zip(own_sequences, most, strict=True)
            if own is not None and count > 0
        }
        starts = {id(own): len(own.ids) for own in own_sequences if own is not None}
        active = [own for own in own_sequences if own is not None and id(own) in left]
        while active:
            active = self._step(active)
            for own in active:
                left[id(own)] -= 1
            active = [own for own in active if left[id(own)] > 0 and own.pending == 1]
        return [own.ids[starts[id(own)] :] if own is not None else [] for own in own_sequences]

    def forget(self, key: str) -> None:
        own = self._sequences.pop(key, None)
        if own is not None:
            assert own.row is not None
            self._rows.append(own.row)
            self._blocks.release(own.blocks)

    def _catch_up(self, served: Sequence, count: int) -> Sequence | None:
        """Return the draft sequence, cut to its common prefix with `served`; None if there is no room."""
        own = self._sequences.get(served.spec.key)
        if own is None:
            if not self._rows:
                return None
            own = Sequence(served.spec, rotary_change=rotary_change_of(self.node))
            self._sequences[served.spec.key] = own
            own.row, own.computed = self._rows.popleft(), 0
        known = min(own.computed, len(served.ids) - 1)
        while own.ids[:known] != served.ids[:known]:
            known -= 1
        long_factors = own.needs_long_factors(len(served.ids))
        if long_factors is not own.long_factors:
            own.long_factors, known = long_factors, 0
        own.ids, own.computed = list(served.ids), known
        if own.room_before_change(count) < count:
            return None  # its factors would change among the drafts
        missing = self._blocks.blocks_for(len(own.ids) + count) - len(own.blocks)
        if missing > self._blocks.free or len(own.ids) + count > self.node.max_positions:
            return None
        if missing > 0:
            own.blocks += self._blocks.allocate(missing)
        return own

    @torch.inference_mode()
    def _step(self, active: list[Sequence]) -> list[Sequence]:
        """Run one step, and return the sequences that got another token."""
        budget, spans = self._budget, []
        for own in active:
            count = min(own.pending, budget)
            if count:
                spans.append(Span(own, own.computed, count))
                budget -= count
        step = self._builder.build(spans)
        with attention_context(self._pool, step):
            hidden = self.node.forward(self.node.embed(step.token_ids), step)
        done = [span for span in spans if span.samples]
        tokens = (
            sample(self.node.head(hidden, step.logit_indices), step.sampling, self._key).tolist()
            if done
            else []
        )
        for span in spans:
            span.sequence.computed += span.count
        extended: list[Sequence] = []
        for span, token in zip(done, tokens, strict=True):
            if token != NOT_A_TOKEN:
                span.sequence.ids.append(token)
                extended.append(span.sequence)
        return extended
