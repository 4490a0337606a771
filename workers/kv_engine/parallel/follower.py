"""The engine of a follower rank: it runs the forwards that its leader sends, and moves keys and values.

It has its part of the node and a pool with as many blocks as the leader's. It knows no sequences; the leader
decides what the blocks hold and uses the hidden states.
"""

from typing import Final, Never

import torch

from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION, attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import KVNode
from workers.kv_engine.node_parts import inputs_of
from workers.kv_engine.parallel.lockstep import Leader
from workers.kv_engine.parallel.shared_cells import CellOrder, carry_out
from workers.kv_engine.selfcheck import check_node
from workers.machine.cores import cores
from workers.machine.cpu_threads import threads_for, use_cpu_threads


class FollowerEngine:
    """This rank's part of `node`, over a pool of `num_blocks` blocks of `block_size` tokens.

    The constructor takes part in the leader's self-check at load. On a CPU it sets torch's number of threads,
    so create it in the thread that runs it. `kernel` attends over the pool, and `states` is the number of its
    slots for recurrent states, as in `PagedPool.of`.

    Attributes:
        kernels: what computes its part of the layers (`workers.kv_engine.node.KVNode`).
    """

    def __init__(
        self,
        node: KVNode,
        *,
        num_blocks: int,
        block_size: int,
        leader: Leader,
        cpu_cores: int | None = None,
        kernel: AttentionKernel | None = None,
        states: int = 0,
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, cpu_cores or cores()))
        self.node: Final = node
        self.kernels: Final = node.kernels
        self.forwards = 0
        self._leader = leader
        self._pool = PagedPool.of(node, slots=num_blocks * block_size, kernel=kernel, states=states)
        node.use_attention(ATTENTION)
        check_node(node, kernel)

    @torch.inference_mode()
    def run(self) -> Never:
        """Run forwards until the group is lost.

        Raises:
            GroupLostError: the leader or another member is lost.
        """
        while True:
            step = self._leader.next(self.node.device, self.node.dtype)
            if isinstance(step, CellOrder):
                carry_out(step, self._pool, self._leader.connection)
                continue
            with attention_context(self._pool, step):
                self.node.forward(inputs_of(self.node, step), step)
            self.forwards += 1
