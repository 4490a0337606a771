"""The KV-cache engine: schedule, run, sample. One step is one forward of one packed batch.

Synchronous, and owned by one thread. It knows sequences and tokens; not requests, text or the log.
"""

import time
from collections.abc import Sequence as Items
from typing import Final

import torch

from shared.errors import BugError, ClientError
from workers.engine.attention import ATTENTION, PagedPool, attending
from workers.engine.blocks import BlockManager
from workers.engine.cpu_threads import use_cpu_threads
from workers.engine.node import Node
from workers.engine.outcomes import EngineStats, StepFailedError, Work
from workers.engine.sampler import NOT_A_TOKEN, node_key, sample
from workers.engine.scheduler import Scheduler, Span
from workers.engine.selfcheck import check_node
from workers.engine.sequence import Sequence, SequenceSpec, TokenOutput
from workers.engine.step import StepBuilder


class KVEngine:
    """Continuous batching of `node` over a pool of `num_blocks` blocks of `block_size` tokens.

    Making one proves on a short text that pool and stock model agree (`selfcheck.check_node`). On a CPU
    it sets how many threads torch uses, so make it in the thread that steps it.

    Args:
        max_step_tokens: the token budget of a step.
        max_rows: how many sequences may run at once.

    Attributes:
        forwards: how many forwards were run: exactly one per step.
        step_keys: the sequences of the last step.
    """

    def __init__(
        self, node: Node, *, num_blocks: int, block_size: int, max_step_tokens: int, max_rows: int
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(node.parameters)
        self.node: Final = node
        self.forwards = 0
        self.step_keys: tuple[str, ...] = ()
        self._work = Work()
        blocks = BlockManager(num_blocks, block_size)
        self._scheduler = Scheduler(
            blocks, max_rows=max_rows, max_step_tokens=max_step_tokens, max_positions=node.max_positions
        )
        self._sequences: dict[str, Sequence] = {}
        self._builder = StepBuilder(
            max_rows=max_rows,
            max_step_tokens=max_step_tokens,
            max_blocks=min(num_blocks, blocks.blocks_for(node.max_positions)),
            block_size=block_size,
            device=node.device,
        )
        self._pool = PagedPool(
            layers=node.layout.layers,
            kv_heads=node.layout.kv_heads,
            head_dim=node.layout.head_dim,
            slots=blocks.capacity_tokens,
            device=node.device,
            dtype=node.dtype,
        )
        self._node_key = node_key(node.name)
        node.use_attention(ATTENTION)
        check_node(node)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        blocks = self._scheduler.blocks
        return EngineStats(
            forwards=self.forwards,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_used=(blocks.num_blocks - blocks.free) * blocks.block_size,
            kv_total=blocks.capacity_tokens,
            work=self._work,
        )

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence.

        Raises:
            ClientError: it can never be answered here; nothing was queued.
        """
        if spec.key in self._sequences:
            raise BugError(f"sequence {spec.key!r} is in the engine already")
        if spec.finished is not None:
            raise BugError(f"sequence {spec.key!r} has nothing to compute: its prefix ends the answer")
        if not spec.prompt_ids:
            raise ClientError("the prompt is empty: expected at least one token", code="empty_prompt")
        if spec.max_tokens < 1:
            raise ClientError(
                f"max_tokens must be at least 1, found {spec.max_tokens}", code="invalid_max_tokens"
            )
        sequence = Sequence(spec)
        if min(sequence.ids) < 0 or max(sequence.ids) >= self.node.vocab_size:
            raise ClientError(
                f"token ids must be from 0 to {self.node.vocab_size - 1}, found {min(sequence.ids)} to "
                f"{max(sequence.ids)}",
                code="invalid_token_id",
            )
        self._scheduler.add(sequence)
        self._sequences[spec.key] = sequence
        self._work.sequences += 1

    def cancel(self, key: str) -> bool:
        """Forget a sequence; False when it is not (or no longer) here."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        self._scheduler.remove(sequence)
        return True

    def step(self) -> list[TokenOutput]:
        """Run one forward, and give the tokens it led to. Without work, nothing is run.

        Raises:
            StepFailedError: for some of the step's sequences, which are gone.
        """
        begun_s = time.perf_counter()
        spans = self._scheduler.schedule()
        self.step_keys = tuple(span.sequence.spec.key for span in spans)
        if not spans:
            return []
        try:
            tokens = self._run(spans)
        except Exception as error:  # the batch fails, whatever it was: the engine must outlive it
            self._drop(self.step_keys)
            raise StepFailedError(
                f"engine step {self.forwards} failed: {type(error).__name__}: {error}", keys=self.step_keys
            ) from error
        self._work.count_step(
            rows=len(spans),
            computed=sum(span.count for span in spans),
            sampled=len(tokens),
            took_s=time.perf_counter() - begun_s,
        )
        self._scheduler.advance(spans)
        return self._outputs([span.sequence for span in spans if span.samples], tokens)

    @torch.inference_mode()
    def _run(self, spans: list[Span]) -> list[int]:
        """One forward; the sampled tokens of the spans that sample, in order."""
        self.forwards += 1
        step = self._builder.build(spans)
        with attending(self._pool, step):
            hidden = self.node.forward(self.node.embed(step.token_ids), step)
        if not step.logit_indices.numel():
            return []
        logits = self.node.head(hidden, step.logit_indices)
        return [int(token) for token in sample(logits, step.sampling, self._node_key).tolist()]

    def _outputs(self, sampled: list[Sequence], tokens: list[int]) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        failed: list[str] = []
        for sequence, token in zip(sampled, tokens, strict=True):
            spec = sequence.spec
            if token == NOT_A_TOKEN:
                failed.append(spec.key)
                continue
            index = sequence.generated
            sequence.ids.append(token)
            finish = spec.finish_reason(token, index + 1)
            outputs.append(
                TokenOutput(key=spec.key, token_id=token, index=index, finish=finish, step=self.forwards)
            )
            if finish is not None:
                self._drop([spec.key])
        if failed:
            self._drop(failed)
            raise StepFailedError(
                f"the model's logits are not numbers for {len(failed)} of {len(sampled)} sequences; "
                "its weights are damaged, or its dtype is too narrow for it",
                keys=failed,
                outputs=outputs,
            )
        return outputs

    def _drop(self, keys: Items[str]) -> None:
        for key in keys:
            self.cancel(key)
