"""The scheduler: who takes part in the next step.

First come, first served. A sequence is admitted only when its prompt *and* all it may generate fit in
free blocks, which are then its own to the end: so nothing that runs can run out of memory, and nothing
is ever preempted. One that is larger than the whole pool is refused; any other waits in order.

A step is a packed batch within a token budget: one token of every sequence that decodes, then spans
of the prompts that are not in the pool yet. Sequences join and leave at every step. One that is held is
left out of the steps and keeps what it has. No torch here.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shared.errors import BugError, ClientError
from workers.engine.blocks import BlockManager
from workers.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of a sequence, from position `start` on, computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether nothing of the sequence is left to compute behind it."""
        return self.start + self.count == len(self.sequence.ids)

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token can be sampled behind it."""
        return self.reaches_end and self.sequence.spec.max_tokens > 0

    @property
    def scored(self) -> int:
        """How many of its first tokens tell what the model thought of the prompt's next one."""
        spec = self.sequence.spec
        last = len(spec.prompt_ids) - 1
        return max(0, min(self.count, last - self.start)) if spec.scores_prompt else 0


class Scheduler:
    """Admission and batching over one pool.

    Args:
        blocks: the pool's free blocks.
        max_rows: how many sequences may run at once.
        max_step_tokens: the budget of a step. At least `max_rows`, so that a prompt always gets on
            beside the sequences that decode.
        max_positions: the model's context length.
    """

    def __init__(
        self, blocks: BlockManager, *, max_rows: int, max_step_tokens: int, max_positions: int
    ) -> None:
        if max_rows < 1 or max_step_tokens < max_rows:
            raise ValueError(
                f"max_step_tokens must be at least max_rows, and that at least 1; "
                f"found max_step_tokens={max_step_tokens}, max_rows={max_rows}"
            )
        self.blocks = blocks
        self.max_step_tokens = max_step_tokens
        self.max_positions = max_positions
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_rows = deque(range(max_rows))

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or admit anybody."""
        return any(not sequence.held for sequence in self.running) or self._admits

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
        self.waiting.append(sequence)

    def schedule(self) -> list[Span]:
        """Admit who fits, and choose the next step's spans: decodes first, then prompts in order."""
        self._admit()
        # There are never more decodes than rows, and the budget covers the rows: only prompts are cut.
        decodes = [Span(s, s.computed, 1) for s in self.running if s.pending == 1 and not s.held]
        return decodes + list(self._prefills(self.max_step_tokens - len(decodes)))

    def advance(self, spans: Iterable[Span]) -> None:
        """The spans are in the pool."""
        for span in spans:
            span.sequence.computed += span.count

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence: finished, failed or cancelled; its blocks and its row are free again."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        self._free_rows.append(sequence.row)
        sequence.blocks, sequence.row = [], None

    @property
    def _admits(self) -> bool:
        """Whether the first that waits can run now; nobody overtakes it."""
        return bool(
            self.waiting and self._free_rows and self.blocks.can_allocate(self.waiting[0].reserved_tokens)
        )

    def _admit(self) -> None:
        while self._admits:
            sequence = self.waiting.popleft()
            sequence.blocks = self.blocks.allocate(sequence.reserved_tokens)
            sequence.row = self._free_rows.popleft()
            self.running.append(sequence)
        if self.waiting and not self.running:
            raise BugError("the pool is idle, and yet its first sequence does not fit")

    def _prefills(self, budget: int) -> Iterable[Span]:
        for sequence in self.running:
            if budget == 0:
                return
            if sequence.pending > 1 and not sequence.held:
                count = min(sequence.pending, budget)
                budget -= count
                yield Span(sequence, sequence.computed, count)
