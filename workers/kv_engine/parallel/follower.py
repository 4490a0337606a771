"""The engine of a rank that follows: it runs the forwards its leader says, and nothing else.

It has the node's part and a pool of its own, of as many blocks as the leader's, and knows no sequences: which
blocks hold what, and what becomes of the hidden states, the leader knows.
"""

from typing import Final, Never

import torch

from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION, attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import KVNode
from workers.kv_engine.parallel.lockstep import Leader
from workers.kv_engine.selfcheck import check_node
from workers.machine.cpu_threads import cores, threads_for, use_cpu_threads


class FollowerEngine:
    """The part of `node` that this rank computes, over a pool of `num_blocks` blocks of `block_size` tokens.

    Making one takes part in the proof that pool and stock model agree, as the leader's engine does. On a CPU
    it sets how many threads torch uses, so make it in the thread that runs it. `kernel` attends over the
    pool, as `PagedPool.of` has it.

    Attributes:
        kernels: who computes its part's layers (`workers.kv_engine.node.KVNode`).
        forwards: how many were run.
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
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, cpu_cores or cores()))
        self.node: Final = node
        self.kernels: Final = node.kernels
        self.forwards = 0
        self._leader = leader
        self._pool = PagedPool.of(node, slots=num_blocks * block_size, kernel=kernel)
        node.use_attention(ATTENTION)
        check_node(node, kernel)

    @torch.inference_mode()
    def run(self) -> Never:
        """Follow until the leader is gone.

        Raises:
            GroupLostError: it is, or another member.
        """
        while True:
            step = self._leader.step(self.node.device)
            with attention_context(self._pool, step):
                self.node.forward(self.node.embed(step.token_ids), step)
            self.forwards += 1
