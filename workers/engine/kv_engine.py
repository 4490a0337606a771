"""The KV-cache engine: schedule, run, sample. One step is one forward of one packed batch.

Synchronous, and owned by one thread. It knows sequences and tokens; not requests, text or the log.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import islice
from math import isnan
from typing import Final

import numpy as np
import torch

from shared.errors import BugError, ClientError, DalSegnoError, WorkerError
from shared.tensors import Handle
from workers.arrays import dtype_name
from workers.data_plane.port import Array
from workers.engine.adjust import adjust
from workers.engine.attention import ATTENTION, PagedPool, attending
from workers.engine.blocks import BlockManager
from workers.engine.cpu_threads import cores, threads_for, use_cpu_threads
from workers.engine.kv_transfer import Allocate, check_kv, export_kv, import_kv
from workers.engine.logprobs import score
from workers.engine.node import Node
from workers.engine.outcomes import EngineStats, StepFailedError, Work
from workers.engine.sampler import NOT_A_TOKEN, node_key, sample
from workers.engine.scheduler import Scheduler, Span
from workers.engine.selfcheck import check_node
from workers.engine.sequence import (
    FinishReason,
    Output,
    PromptOutput,
    Sequence,
    SequenceSpec,
    TokenOutput,
    TokenScore,
)
from workers.engine.step import StepBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What a forward came to: sampled tokens, and the scores asked for; each in the order of the spans."""

    tokens: list[int]
    scores: list[TokenScore]
    prompt_scores: list[TokenScore]


class KVEngine:
    """Continuous batching of `node` over a pool of `num_blocks` blocks of `block_size` tokens.

    Making one proves on a short text that pool and stock model agree (`selfcheck.check_node`). On a CPU
    it sets how many threads torch uses, so make it in the thread that steps it.

    Args:
        max_step_tokens: the token budget of a step.
        max_rows: how many sequences may run at once.
        export_to: where keys and values go that are handed on; none are without it.
        cpu_cores: how many of the machine's cores are for it, on a CPU; all when absent.

    Attributes:
        forwards: how many forwards were run: exactly one per step.
        step_keys: the sequences of the last step.
    """

    def __init__(
        self,
        node: Node,
        *,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_rows: int,
        export_to: Allocate | None = None,
        cpu_cores: int | None = None,
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, cpu_cores or cores()))
        self.node: Final = node
        self.forwards = 0
        self.step_keys: tuple[str, ...] = ()
        self._work = Work()
        self._export_to = export_to
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
            held=sum(sequence.held for sequence in self._scheduler.running),
            kv_used=(blocks.num_blocks - blocks.free) * blocks.block_size,
            kv_total=blocks.capacity_tokens,
            work=self._work,
        )

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence.

        Raises:
            ClientError: it can never be answered here; nothing was queued.
            KVMismatchError: the keys and values it brings do not fit this pool; nothing was queued.
        """
        if spec.key in self._sequences:
            raise BugError(f"sequence {spec.key!r} is in the engine already")
        if spec.finished is not None:
            raise BugError(f"sequence {spec.key!r} has nothing to compute: its prefix ends the answer")
        if not spec.prompt_ids:
            raise ClientError("the prompt is empty: expected at least one token", code="empty_prompt")
        if spec.scores_prompt and spec.logprobs is None:
            raise BugError(f"sequence {spec.key!r} is to score its prompt, but says not how many likeliest")
        is_only_scored = spec.max_tokens == 0 and spec.scores_prompt and len(spec.prompt_ids) > 1
        if spec.max_tokens < 1 and not is_only_scored:
            raise ClientError(
                f"max_tokens must be at least 1, found {spec.max_tokens}", code="invalid_max_tokens"
            )
        sequence = Sequence(spec)
        for what, ids in spec.named_ids.items():
            if ids and (min(ids) < 0 or max(ids) >= self.node.vocab_size):
                raise ClientError(
                    f"{what}: token ids must be from 0 to {self.node.vocab_size - 1}, found {min(ids)} to "
                    f"{max(ids)}",
                    code="invalid_token_id",
                )
        if len(spec.bannable) >= self.node.vocab_size:
            raise ClientError(
                "bad_words: with them and min_tokens there is no token left to choose", code="nothing_left"
            )
        self._check_transfer(sequence)
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

    def hold(self, key: str) -> bool:
        """Leave a sequence out of all steps; it keeps row and blocks. False when it is not here."""
        return self._set_held(key, held=True)

    def resume(self, key: str) -> bool:
        """Let a sequence take part again; False when it is not here."""
        return self._set_held(key, held=False)

    def step(self) -> list[Output]:
        """Run one forward, and give what it led to. Without work, nothing is run.

        Raises:
            StepFailedError: for some of the step's sequences, which are gone.
        """
        begun_s = time.perf_counter()
        scheduled = self._scheduler.schedule()
        failures = self._import(scheduled)
        spans = [span for span in scheduled if span.sequence.spec.key not in failures]
        self.step_keys = tuple(span.sequence.spec.key for span in spans)
        if not spans:
            return self._told([], [], failures, asked=0)
        try:
            ran = self._run(spans)
        except Exception as error:  # the batch fails, whatever it was: the engine must outlive it
            self._drop([*self.step_keys, *failures])
            raise StepFailedError(
                f"engine step {self.forwards} failed: {type(error).__name__}: {error}",
                keys=self.step_keys,
                others=failures,
            ) from error
        self._work.count_step(
            rows=len(spans),
            computed=sum(span.count for span in spans),
            sampled=len(ran.tokens),
            took_s=time.perf_counter() - begun_s,
        )
        self._scheduler.advance(spans)
        return self._outputs(spans, ran, failures)

    @torch.inference_mode()
    def _run(self, spans: list[Span]) -> _Ran:
        """One forward."""
        self.forwards += 1
        step = self._builder.build(spans)
        with attending(self._pool, step):
            hidden = self.node.forward(self.node.embed(step.token_ids), step)
        wanted, scores, prompt_scores = step.scored, list[TokenScore](), list[TokenScore]()
        sizes = {"top": wanted.top if wanted else 0, "vocab_size": self.node.vocab_size}
        if wanted and wanted.prompt_ids.numel():
            prompt_scores = score(
                lambda at: self.node.head(hidden, at), wanted.prompt_indices, wanted.prompt_ids, **sizes
            )
        if not step.logit_indices.numel():
            return _Ran(tokens=[], scores=[], prompt_scores=prompt_scores)
        logits = self.node.head(hidden, step.logit_indices)
        chosen_from = logits
        if step.adjusted is not None:
            # What is scored are the logits as the model made them.
            chosen_from = logits.clone() if wanted else logits
            adjust(chosen_from, step.adjusted)
        tokens = sample(chosen_from, step.sampling, self._node_key)
        if wanted and wanted.sampled.numel():
            taken = tokens.index_select(0, wanted.sampled)
            scores = score(lambda at: logits.index_select(0, at), wanted.sampled, taken, **sizes)
        return _Ran(tokens=tokens.tolist(), scores=scores, prompt_scores=prompt_scores)

    def _outputs(self, spans: list[Span], ran: _Ran, failures: dict[str, DalSegnoError]) -> list[Output]:
        outputs: list[Output] = []
        failed: list[str] = []
        asked = 0
        tokens, scores, prompt_scores = iter(ran.tokens), iter(ran.scores), iter(ran.prompt_scores)
        for span in spans:
            spec = span.sequence.spec
            of_prompt = (
                [_cut(told, spec) for told in islice(prompt_scores, span.scored)] if ran.prompt_scores else []
            )
            token = next(tokens) if span.samples else None
            told = _cut(next(scores), spec) if token is not None and spec.logprobs is not None else None
            asked += bool(of_prompt) or token is not None
            if token == NOT_A_TOKEN or any(isnan(told.logprob) for told in of_prompt):
                failed.append(spec.key)
                continue
            is_only_scored = span.reaches_end and spec.max_tokens == 0
            if of_prompt or is_only_scored:
                outputs.append(self._prompt_output(spec, of_prompt, is_last=is_only_scored))
            if token is None:
                continue
            try:
                outputs.append(self._token_output(span.sequence, token, told))
            except Exception as error:  # noqa: BLE001 - one tensor that finds no room must not cost the others
                failures[spec.key] = _of_one(error)
        return self._told(outputs, failed, failures, asked=asked)

    def _told(
        self, outputs: list[Output], failed: list[str], failures: dict[str, DalSegnoError], *, asked: int
    ) -> list[Output]:
        """The outputs, with an error around them where there is one; who failed is forgotten."""
        if not failed and not failures:
            return outputs
        self._drop([*failed, *failures])
        message = "; ".join(error.message for error in failures.values())
        if failed:
            message = (
                f"the model's logits are not numbers for {len(failed)} of {asked} sequences; "
                "its weights are damaged, or its dtype is too narrow for it"
            )
        raise StepFailedError(message, keys=failed, outputs=outputs, others=failures)

    def _prompt_output(self, spec: SequenceSpec, scores: list[TokenScore], *, is_last: bool) -> PromptOutput:
        finish = FinishReason.LENGTH if is_last else None
        if is_last:
            self._drop([spec.key])
        return PromptOutput(key=spec.key, scores=tuple(scores), finish=finish, step=self.forwards)

    def _token_output(self, sequence: Sequence, token: int, told: TokenScore | None) -> TokenOutput:
        spec, index = sequence.spec, sequence.generated
        sequence.ids.append(token)
        finish, kv = spec.finish_reason(token, index + 1), None
        if finish is not None:
            kv = self._export(sequence)
            self._drop([spec.key])
        return TokenOutput(
            key=spec.key, token_id=token, index=index, finish=finish, step=self.forwards, score=told, kv=kv
        )

    def _drop(self, keys: Items[str]) -> None:
        for key in keys:
            self.cancel(key)

    def _set_held(self, key: str, *, held: bool) -> bool:
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        sequence.held = held
        return True

    # ---- keys and values from and to other engines -------------------------------------------------
    def _check_transfer(self, sequence: Sequence) -> None:
        spec = sequence.spec
        if spec.export is not None and (self._export_to is None or spec.max_tokens == 0):
            raise BugError(
                f"sequence {spec.key!r} is to hand on its keys and values, but "
                + ("there is no store for them" if self._export_to is None else "it ends without a token")
            )
        if spec.kv is None:
            return
        if spec.scores_prompt:
            raise BugError(f"sequence {spec.key!r} is to score a prompt that was computed elsewhere")
        check_kv(spec.kv, self.node.layout, self.node.dtype, longest=len(sequence.ids))

    @torch.inference_mode()
    def _import(self, spans: list[Span]) -> dict[str, DalSegnoError]:
        """Copy in what sequences bring, before their first span; who failed of it, and why."""
        failures: dict[str, DalSegnoError] = {}
        for sequence in (span.sequence for span in spans):
            spec = sequence.spec
            if spec.kv is None:
                continue
            try:
                import_kv(self._pool, self._cells(sequence, spec.kv.shape[2]), spec.kv)
                if spec.on_kv_read is not None:
                    spec.on_kv_read()
            except Exception as error:  # noqa: BLE001 - whatever the bytes are, it is one sequence's
                failures[spec.key] = _of_one(error)
            # From here on nobody looks at them, and they may be somebody else's memory.
            sequence.spec = replace(spec, kv=None, on_kv_read=None)
        return failures

    @torch.inference_mode()
    def _export(self, sequence: Sequence) -> Handle | None:
        """Copy out the keys and values of a sequence that has ended, while its blocks are its own."""
        export = sequence.spec.export
        if export is None:
            return None
        assert self._export_to is not None, "refused when it was added"
        layout, dtype = self.node.layout, dtype_name(self.node.dtype)
        shape = (layout.layers, 2, sequence.computed, layout.kv_heads, layout.head_dim)
        handle, data = self._export_to(export.key, dtype, shape, scope=export.scope)
        export_kv(
            self._pool, self._cells(sequence, sequence.computed), Array(dtype=dtype, shape=shape, data=data)
        )
        return handle

    def _cells(self, sequence: Sequence, tokens: int) -> torch.Tensor:
        """The pool's cells of a sequence's first tokens: (tokens,) int64."""
        size = self._scheduler.blocks.block_size
        cells = (np.array(sequence.blocks, np.int64)[:, None] * size + np.arange(size)).ravel()
        return torch.from_numpy(cells[:tokens]).to(self.node.device)


def _of_one(error: Exception) -> DalSegnoError:
    """An error as the one sequence is told that failed of it."""
    if isinstance(error, DalSegnoError):
        return error
    return WorkerError(f"{type(error).__name__}: {error}", code=StepFailedError.code)


def _cut(told: TokenScore, spec: SequenceSpec) -> TokenScore:
    """With no more of the likeliest than its sequence asked for: another in the step may want more."""
    return told if len(told.top) == spec.logprobs else replace(told, top=told.top[: spec.logprobs])
