"""The engine of a follower rank: it runs the forwards that its leader sends, and moves keys and values.

It has its part of the node and a pool with as many blocks as the leader's. It knows no sequences; the leader
decides what the blocks hold and uses the hidden states. On a GPU it records the same steps as the leader.
"""

from typing import Final, Never

import torch

from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION, attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.gpu.cuda_graphs import GraphCapture
from workers.kv_engine.gpu.fusion import prepare_kernels
from workers.kv_engine.node import KVNode, position_axes_of, position_dtype_of, rotary_change_of
from workers.kv_engine.node_parts import inputs_of
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.follower_graphs import FollowerGraphs
from workers.kv_engine.parallel.lockstep import CAN_RECORD, Leader, ReplayedStep
from workers.kv_engine.parallel.shared_cells import CellOrder, carry_out
from workers.kv_engine.selfcheck import check_node
from workers.kv_engine.step import StepBuilder
from workers.machine.cores import cores
from workers.machine.cpu_threads import threads_for, use_cpu_threads


class FollowerEngine:
    """This rank's part of `node`, over a pool of `num_blocks` blocks of `block_size` tokens.

    The constructor takes part in the leader's self-check at load. On a CPU it sets torch's number of threads,
    so create it in the thread that runs it.

    Args:
        max_step_tokens: of the leader's engine.
        max_sequences: of the leader's engine.
        kernel: attends over the pool.
        states: the number of the pool's slots for recurrent states, as in `PagedPool.of`.
        capture: records the leader's steps, if all members can.

    Attributes:
        kernels: what computes its part of the layers (`workers.kv_engine.node.KVNode`).
    """

    def __init__(
        self,
        node: KVNode,
        *,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_sequences: int,
        leader: Leader,
        cpu_cores: int | None = None,
        kernel: AttentionKernel | None = None,
        states: int = 0,
        capture: GraphCapture | None = None,
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, cpu_cores or cores()))
        self.node: Final = node
        self.kernels: Final = node.kernels
        self.forwards = 0
        self._leader = leader
        # As many as the leader has: the last block is for padding.
        self._pool = PagedPool.of(node, slots=(num_blocks + 1) * block_size, kernel=kernel, states=states)
        node.use_attention(ATTENTION)
        prepare_kernels(self._pool, block_size)
        check_node(node, kernel)
        self._graphs: FollowerGraphs | None = None
        can_record = capture is not None and self._pool.has_static_kernel
        if leader.ask(CAN_RECORD, can_record).are_all and capture is not None:
            builder = StepBuilder(
                max_sequences=max_sequences,
                max_step_tokens=max_step_tokens,
                max_blocks=min(num_blocks, -(-node.max_positions // block_size)),
                block_size=block_size,
                device=node.device,
                padding_block=num_blocks,
                position_axes=position_axes_of(node),
                position_dtype=position_dtype_of(node),
                has_long_factors=rotary_change_of(node) is not None,
            )
            self._graphs = FollowerGraphs(
                node,
                self._pool,
                builder,
                capture,
                max_sequences=max_sequences,
                max_step_tokens=max_step_tokens,
                group=leader,
            )

    @torch.inference_mode()
    def run(self) -> Never:
        """Run forwards until the group is lost.

        Raises:
            GroupLostError: the leader or another member is lost.
        """
        while True:
            match self._leader.next(self.node.device, self.node.dtype):
                case CellOrder() as order:
                    carry_out(order, self._pool, self._leader.connection)
                    continue
                case ReplayedStep(step, size):
                    if self._graphs is None:
                        raise GroupLostError("the leader replays a step, and this rank has recorded none")
                    self._graphs.replay(step, size)
                case step:
                    with attention_context(self._pool, step):
                        self.node.forward(inputs_of(self.node, step), step)
            self.forwards += 1
