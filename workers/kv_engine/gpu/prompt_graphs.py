"""Steps with short prompts as CUDA graphs: their layers are recorded once per number of tokens.

    build ── layers, replayed ── head, adjust, mask, sample, as they come ── tokens

On an H200 the launches of an unrecorded step of Qwen3-8B took 14 ms, for 16 tokens of a prompt as for 512,
and all decodes of the step waited for them. A step of at most `MOST_TOKENS` tokens is padded to the next size
and replayed: prompts, the rest of a cached prompt, decodes beside these, and drafts. A larger step computes
for longer than its launches take.

A recording has as many spans as there may be sequences, most of them empty, and the last one is the padding.
It needs an attention kernel that reads lengths on the device and computes empty spans (our Triton kernel).
Recordings share the memory of the decodes' (`workers.kv_engine.gpu.cuda_graphs`).
"""

from bisect import bisect_left
from collections.abc import Sequence as Items
from functools import partial
from typing import Final

import torch

from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.gpu.cuda_graphs import (
    GraphCapture,
    Group,
    Replay,
    agreed,
    computed_layers,
    record_each,
    stands_for_media,
)
from workers.kv_engine.node import KVNode
from workers.kv_engine.sequence import Span
from workers.kv_engine.step import StepBuilder

MOST_TOKENS: Final = 512
"""Of a recorded step."""
_LEAST_TOKENS: Final = 16


class PromptGraphs:
    """The recorded steps with prompts of one engine; `group` is as in `record_each`.

    Attributes:
        sizes: the numbers of tokens of the recorded steps, ascending.
    """

    def __init__(
        self,
        node: KVNode,
        pool: PagedPool,
        builder: StepBuilder,
        capture: GraphCapture,
        *,
        max_step_tokens: int,
        group: Group | None = None,
    ) -> None:
        self._node = node
        self._pool = pool
        self._builder = builder
        self._group = group
        self._hidden: torch.Tensor | None = None  # (tokens, hidden) of the largest step, in the node's dtype
        self._bodies: Final[dict[int, Replay]] = record_each(
            token_sizes(max_step_tokens),
            partial(self._record, capture),
            node.architecture,
            "tokens",
            group,
        )
        self.sizes: Final = sorted(self._bodies)

    def size_of(self, spans: Items[Span]) -> int:
        """Return the number of tokens of the recorded step that computes these spans; 0 if none does."""
        total = sum(span.count for span in spans)
        if not self.sizes or total > self.sizes[-1] or any(map(stands_for_media, spans)):
            return 0
        return self.sizes[bisect_left(self.sizes, total)]

    def forward(self, size: int, tokens: int) -> torch.Tensor:
        """Replay the step that was built with `size` tokens; return the hidden states of the first ones.

        They are a copy: the state of a pooled prompt is kept while later steps are replayed.
        """
        self._bodies[size]()
        assert self._hidden is not None
        return self._hidden[:tokens].clone()

    @torch.inference_mode()
    def _record(self, capture: GraphCapture, size: int) -> Replay:
        self._builder.build([], tokens=size)  # padding only
        return capture.capture(agreed(partial(self._run, size), self._group))

    def _run(self, size: int) -> None:
        step = self._builder.captured_prompt(size)
        hidden = computed_layers(self._node, self._pool, step, self._group)
        if self._hidden is None:
            self._hidden = hidden.new_empty(size, hidden.shape[-1])
        self._hidden[:size].copy_(hidden)


def token_sizes(most: int) -> list[int]:
    """Return the recorded numbers of tokens: powers of two and the middles between the larger ones."""
    doubled = [1 << place for place in range(_LEAST_TOKENS.bit_length() - 1, MOST_TOKENS.bit_length())]
    halfway = [3 * size // 2 for size in doubled if 128 <= size < MOST_TOKENS]
    return sorted(size for size in (*doubled, *halfway) if size <= most)
