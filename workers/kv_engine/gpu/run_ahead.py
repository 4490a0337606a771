"""A step ahead: who is in the step behind one of decodes, decided before the tokens of that one are read.

    device   │ step N            │ step N+1          │ step N+2
    host     launch N+1 ─ read N ─ tell of N ─ launch N+2 ─ read N+1 ─ tell of N+1 ─ ...

Only where those tokens can change nothing of it but who has ended: a sequence that ends by one of them is
computed once more, and what comes of that is thrown away. Wherever anything else may change the tokens are
read first, and the scheduler decides (docs/adr/0020-a-step-ahead.md). No torch here.
"""

from collections.abc import Sequence as Items

from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Span


def plan_step_ahead(spans: Items[Span], scheduler: Scheduler) -> list[Span] | None:
    """The spans of the step behind a step of decodes that is under way; None where that has to be read first.

    Those that grow have the blocks for it then.

    Args:
        spans: of the step under way, each of one token; without those whose sequences are gone or held.
        scheduler: knows who else is there, and has the blocks.
    """
    if not all(span.sequence.can_speculate for span in spans):
        return None  # what is done to the logits of the next token hangs on the one before
    if sum(not sequence.held for sequence in scheduler.running) > len(spans):
        return None
    going = [span.sequence for span in spans if span.sequence.generated + 1 < span.sequence.spec.max_tokens]
    if scheduler.waiting and (len(going) < len(spans) or scheduler.admits):
        return None
    blocks = scheduler.blocks
    size = blocks.block_size
    growing = [sequence for sequence in going if len(sequence.ids) == len(sequence.blocks) * size]
    if not going or len(growing) > blocks.free:
        return None
    for sequence in growing:
        sequence.blocks += blocks.allocate(1)
    return [Span(sequence, len(sequence.ids), 1, sequence.reported) for sequence in going]
