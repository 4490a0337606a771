"""The recorded steps of a follower of a tensor-parallel group: those of its leader, without head and sampler.

    leader    records a size          ──sums──   follower records it
    leader    are the layers computed? <──────>  follower: the same; if some could not, the group restarts
    leader    is it recorded?          <──────>  follower: the same; all use it, or none does
    leader    replays a step           ──────>   follower writes the step into its buffers, and replays

Sums over all members are part of a recording (NCCL can be recorded), so all members record the same sizes in
the same order. Members that fail at the same operation, of a model that cannot be recorded, go on without
recordings. So they do if the leader's head finds no memory: that is after the last sum. A member that fails
alone between two sums would leave the others one sum behind, so the group restarts.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.gpu.cuda_graphs import (
    GraphCapture,
    Group,
    Replay,
    agreed,
    buckets,
    computed_layers,
    record_each,
)
from workers.kv_engine.gpu.prompt_graphs import token_sizes
from workers.kv_engine.node import KVNode
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.lockstep import RecordingSize
from workers.kv_engine.step import Step, StepBuilder


class FollowerGraphs:
    """The recorded steps of one follower. The constructor records all of them, with the leader.

    Args:
        node: this member's part.
        pool: its keys and values.
        builder: of the sizes of the leader's.
        capture: records the steps.
        max_sequences: of the leader's engine.
        max_step_tokens: of the leader's engine.
        group: the connection to the leader (`workers.kv_engine.parallel.lockstep.Leader`).
    """

    def __init__(
        self,
        node: KVNode,
        pool: PagedPool,
        builder: StepBuilder,
        capture: GraphCapture,
        *,
        max_sequences: int,
        max_step_tokens: int,
        group: Group,
    ) -> None:
        self._node = node
        self._pool = pool
        self._builder = builder
        self._capture = capture
        self._group = group
        record = partial(record_each, architecture=node.architecture, group=group)
        by_rows = record(buckets(max_sequences), self._record_rows, unit="rows")
        # As the leader: without recorded decodes it records no prompts.
        by_tokens = (
            record(token_sizes(max_step_tokens), self._record_tokens, unit="tokens") if by_rows else {}
        )
        self._replays: Final = {
            **{RecordingSize(rows=rows): replay for rows, replay in by_rows.items()},
            **{RecordingSize(tokens=tokens): replay for tokens, replay in by_tokens.items()},
        }

    def replay(self, step: Step, size: RecordingSize) -> None:
        """Compute the leader's step, which is on the CPU.

        Raises:
            GroupLostError: this member has no such recording.
        """
        replay = self._replays.get(size)
        if replay is None:
            raise GroupLostError(
                f"the leader replays a step of {size.rows} rows or {size.tokens} tokens, which this rank has "
                "not recorded: expected all members to have the same settings"
            )
        self._builder.adopt(step, rows=size.rows, tokens=size.tokens)
        replay()

    @torch.inference_mode()
    def _record_rows(self, rows: int) -> Replay:
        self._builder.build([], rows=rows)  # padding only
        return self._captured(partial(self._builder.captured, rows))

    @torch.inference_mode()
    def _record_tokens(self, tokens: int) -> Replay:
        self._builder.build([], tokens=tokens)  # padding only
        return self._captured(partial(self._builder.captured_prompt, tokens))

    def _captured(self, step_of: Callable[[], Step]) -> Replay:
        def compute() -> None:
            computed_layers(self._node, self._pool, step_of(), self._group)

        return self._capture.capture(agreed(compute, self._group))
