"""The spans of the next decode step, chosen before the tokens of the current step are read.

    device   │ step N            │ step N+1          │ step N+2
    host     launch N+1 ─ read N ─ report N ─ launch N+2 ─ read N+1 ─ report N+1 ─ ...

A step is launched ahead only if the unread tokens can change nothing in it except which sequences have
ended. A sequence that has ended is computed once more, and that result is discarded. In any other case the
tokens are read first, and the scheduler decides (docs/adr/0020-a-step-ahead.md). No torch here.
"""

from collections.abc import Sequence as Items

from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence import Span


def plan_step_ahead(spans: Items[Span], scheduler: Scheduler) -> list[Span] | None:
    """Return the spans of the step after a decode step in progress; None if that step must be read first.

    `spans` are those of the step in progress, each of one token, without sequences that are gone or held.
    Sequences that need another block get it here.
    """
    if not all(span.sequence.can_run_ahead for span in spans):
        return None  # what is allowed next depends on the unread token
    if sum(not sequence.held for sequence in scheduler.running) > len(spans):
        return None
    continuing = [
        span.sequence for span in spans if span.sequence.generated + 1 < span.sequence.spec.max_tokens
    ]
    if not all(sequence.room_before_change(1) for sequence in continuing):
        return None  # the unread token brings it past the change of rotary factors: all keys change
    if scheduler.waiting and (len(continuing) < len(spans) or scheduler.can_admit):
        return None
    blocks = scheduler.blocks
    size = blocks.block_size
    growing = [sequence for sequence in continuing if len(sequence.ids) == len(sequence.blocks) * size]
    if not continuing or len(growing) > blocks.free:
        return None
    for sequence in growing:
        sequence.blocks += blocks.allocate(1)
    return [Span(sequence, len(sequence.ids), 1, sequence.reported) for sequence in continuing]
