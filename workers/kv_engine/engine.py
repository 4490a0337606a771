"""The KV-cache engine: schedule, run, tell. One step is one forward of one packed batch.

Synchronous, and owned by one thread. It knows sequences and tokens; not requests, text or the log.
"""

import time
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import islice
from math import isnan
from typing import Final

import numpy as np
import torch

from shared.errors import BugError, ClientError, DalSegnoError
from shared.telemetry import timeline
from shared.tensors import Handle
from workers.data_plane.arrays import dtype_name
from workers.data_plane.port import Array
from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.cache.pages import TURN_S
from workers.kv_engine.counters import EngineStats, WorkCounters
from workers.kv_engine.failures import StepFailedError, as_dalsegno_error
from workers.kv_engine.gpu.cuda_graphs import GraphCapture
from workers.kv_engine.gpu.run_ahead import plan_step_ahead
from workers.kv_engine.guide_state import GuideState
from workers.kv_engine.kv_transfer import Allocate, check_kv, export_kv, import_kv
from workers.kv_engine.node import Node
from workers.kv_engine.outputs import Output, PromptOutput, TokenOutput, TokenScore
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.lockstep import Followers
from workers.kv_engine.prefill_budget import PrefillBudget
from workers.kv_engine.runner import LaunchedStep, Runner, StepResult
from workers.kv_engine.sampling.sampler import NOT_A_TOKEN
from workers.kv_engine.scheduler import STRETCH, Scheduler
from workers.kv_engine.selfcheck import check_node
from workers.kv_engine.sequence import DraftLength, Sequence, Span
from workers.kv_engine.sequence_spec import FinishReason, SequenceSpec
from workers.kv_engine.speculative.proposer import Proposer
from workers.kv_engine.step import StepBuilder
from workers.machine.cpu_threads import cores, threads_for, use_cpu_threads


class KVEngine:
    """Continuous batching of `node` over a pool of `num_blocks` blocks of `block_size` tokens.

    Making one proves on a short text that pool and stock model agree (`selfcheck.check_node`). On a CPU
    it sets how many threads torch uses, so make it in the thread that steps it.

    Args:
        max_step_tokens: the token budget of a step.
        max_sequences: how many sequences may run at once.
        export_to: where keys and values go that are handed on; none are without it.
        cpu_cores: how many of the machine's cores are for it, on a CPU; all when absent.
        prefix_cache: whether keys and values are kept for others that begin with the same tokens.
        decode_slowdown_limit: how many times as long a step with prompts may take as decodes alone would, those who wait
            counted among them; None is without limit.
        proposer: who guesses tokens, at most `guesses` for each decode in a step; nobody when absent.
        followers: who runs each forward too, where the node is a part of one; its sums wait for them.
        capture: who records the steps of decodes, which are replayed then; not where there are followers.
        kernel: who attends over the pool; what is the device's when absent (`gpu_kernels.default_kernel`).

    Attributes:
        step_keys: the sequences of the last step.
        runs_ahead: whether the step behind one that is replayed is launched before that is read, where it
            can be (`workers.kv_engine.gpu.run_ahead`); not where there is a proposer.
    """

    def __init__(
        self,
        node: Node,
        *,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_sequences: int,
        export_to: Allocate | None = None,
        cpu_cores: int | None = None,
        prefix_cache: bool = True,
        decode_slowdown_limit: float | None = STRETCH,
        proposer: Proposer | None = None,
        guesses: int = 4,
        followers: Followers | None = None,
        capture: GraphCapture | None = None,
        kernel: AttentionKernel | None = None,
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, cpu_cores or cores()))
        self.node: Final = node
        self.step_keys: tuple[str, ...] = ()
        self._work = WorkCounters()
        self._laps = timeline.laps("step")
        self._export_to = export_to
        blocks = BlockManager(num_blocks, block_size)
        self._scheduler = Scheduler(
            blocks,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_positions=node.max_positions,
            prefix_cache=prefix_cache,
            prefill_budget=PrefillBudget(decode_slowdown_limit=decode_slowdown_limit, min_tokens=block_size)
            if decode_slowdown_limit is not None
            else None,
        )
        self._sequences: dict[str, Sequence] = {}
        self._proposer = proposer
        self._guesses = guesses
        self._max_step_tokens = max_step_tokens
        builder = StepBuilder(
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_blocks=min(num_blocks, blocks.blocks_for(node.max_positions)),
            block_size=block_size,
            device=node.device,
            padding_block=num_blocks,
        )
        # The last block is for padding.
        self._pool = PagedPool.of(node, slots=blocks.capacity_tokens + block_size, kernel=kernel)
        node.use_attention(ATTENTION)
        check_node(node, kernel)
        self._runner = Runner(
            node,
            self._pool,
            builder,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            followers=followers,
            capture=capture,
            laps=self._laps,
        )
        self.runs_ahead = proposer is None
        self._under_way: LaunchedStep | None = None
        self._number = 0  # of the step that is told of
        self._read_s = 0.0  # when that one was read

    @property
    def forwards(self) -> int:
        """How many forwards were launched: one per step, of which one may be under way."""
        return self._runner.forwards

    @property
    def has_work(self) -> bool:
        return self._under_way is not None or self._scheduler.has_work

    def stats(self) -> EngineStats:
        blocks = self._scheduler.blocks
        return EngineStats(
            kernels=self.node.kernels,
            forwards=self.forwards,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            held=sum(sequence.held for sequence in self._scheduler.running),
            kv_used=(blocks.num_blocks - blocks.free) * blocks.block_size,
            kv_evictable=blocks.kept * blocks.block_size,
            kv_total=blocks.capacity_tokens,
            cache=self._scheduler.counters,
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
        if spec.max_tokens < 1 and not (spec.max_tokens == 0 and spec.has_prompt_output):
            raise ClientError(
                f"max_tokens must be at least 1, found {spec.max_tokens}", code="invalid_max_tokens"
            )
        if spec.pooling is not None and spec.max_tokens:
            raise BugError(f"sequence {spec.key!r} is to be pooled and answered: expected one of them")
        sequence = Sequence(spec)
        for what, ids in spec.token_ids_by_field.items():
            if ids and (min(ids) < 0 or max(ids) >= self.node.vocab_size):
                raise ClientError(
                    f"{what}: token ids must be from 0 to {self.node.vocab_size - 1}, found {min(ids)} to "
                    f"{max(ids)}",
                    code="invalid_token_id",
                )
        if len(spec.bannable_ids) >= self.node.vocab_size:
            raise ClientError(
                "bad_words: with them and min_tokens there is no token left to choose", code="nothing_left"
            )
        self._check_transfer(sequence)
        if spec.guide is not None:
            sequence.guide_state = GuideState(spec.guide, spec)
        self._scheduler.add(sequence)
        self._sequences[spec.key] = sequence
        self._work.sequences += 1

    def cancel(self, key: str) -> bool:
        """Forget a sequence; False when it is not (or no longer) here."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        self._scheduler.remove(sequence)
        self._runner.forget(key)
        if self._proposer is not None:
            self._proposer.forget(key)
        return True

    def hold(self, key: str) -> bool:
        """Leave a sequence out of all steps; it keeps row and blocks. False when it is not here."""
        return self._set_held(key, held=True)

    def resume(self, key: str) -> bool:
        """Let a sequence take part again; False when it is not here."""
        return self._set_held(key, held=False)

    def prepare(self) -> bool:
        """Use some milliseconds in which nobody asks for anything; whether there is more to prepare."""
        return self._pool.prepare(TURN_S)

    def step(self) -> list[Output]:
        """Give what one forward led to. Without work, nothing is run.

        The one behind it may be under way then: whoever is cancelled or held until the next call gets no
        token of it.

        Raises:
            StepFailedError: for some of the step's sequences, which are gone.
            GroupLostError: who shares the node is gone; there will be no other step.
        """
        begun_s = time.perf_counter()
        if self._laps is not None:
            self._laps.begin()
        step, spans = self._take_under_way()
        failures: dict[str, DalSegnoError] = {}
        if step is None:
            spans, failures = self._schedule()
        else:
            begun_s = self._read_s
        self.step_keys = tuple(span.sequence.spec.key for span in spans)
        if not spans:
            return self._told([], [], failures, asked=0)
        decodes = sum(span.count == 1 for span in spans)
        if self._laps is not None:
            self._laps.lap("schedule")
        try:
            if step is None:
                self._guess(spans)
                step = self._runner.launch(spans)
            ahead = self._launch_ahead(step, spans)
            ran = step.read()
        except GroupLostError:
            raise
        except Exception as error:  # the batch fails, whatever it was: the engine must outlive it
            self._drop([*self.step_keys, *failures])
            raise StepFailedError(
                f"engine step {step.number if step else self.forwards} failed: "
                f"{type(error).__name__}: {error}",
                keys=self.step_keys,
                others=failures,
            ) from error
        if self._laps is not None:
            self._laps.lap("sample")
        self._number, self._under_way, self._read_s = step.number, ahead, time.perf_counter()
        took_s, computed = self._read_s - begun_s, sum(span.count for span in spans)
        if self._scheduler.prefill_budget is not None:
            prompts = sum(span.count for span in spans if not span.is_decode)
            self._scheduler.prefill_budget.observe(decodes=decodes, prefill_tokens=prompts, took_s=took_s)
        tokens = self._settle(spans, step.tokens_of(spans, ran))
        self._work.count_step(
            sequences=len(spans), computed=computed, sampled=sum(map(len, tokens)), took_s=took_s
        )
        self._scheduler.advance(spans)
        outputs = self._outputs(spans, tokens, ran, failures)
        if self._laps is not None:
            self._laps.end(rows=len(spans), computed=computed, sampled=sum(map(len, tokens)))
        return outputs

    def _schedule(self) -> tuple[list[Span], dict[str, DalSegnoError]]:
        """Who is in the next step, with what they bring; and who failed of that."""
        scheduled = self._scheduler.schedule()
        self._pool.reach(self._scheduler.blocks.high_water * self._scheduler.blocks.block_size)
        failures = self._import(scheduled)
        return [span for span in scheduled if span.sequence.spec.key not in failures], failures

    def _take_under_way(self) -> tuple[LaunchedStep | None, list[Span]]:
        """The step that is under way, and those of it that are not gone or held by now; none without any."""
        step, self._under_way = self._under_way, None
        if step is None:
            return None, []
        spans = [
            span
            for span in step.spans
            if self._sequences.get(span.sequence.spec.key) is span.sequence and not span.sequence.held
        ]
        self._work.discarded_tokens += len(step.spans) - len(spans)
        return (step, spans) if spans else (None, [])

    def _launch_ahead(self, step: LaunchedStep, spans: list[Span]) -> LaunchedStep | None:
        """Launch the step behind this one, if it does not have to wait for its tokens."""
        if not self.runs_ahead or step.tokens is None:
            return None
        behind = plan_step_ahead(spans, self._scheduler)
        if behind is None:
            return None
        self._work.ahead += 1
        return self._runner.launch_after(step, behind)

    def _guess(self, spans: list[Span]) -> None:
        """Guess what follows those that decode, as far as there is room in the step and in the pool."""
        if self._proposer is None:
            return
        ahead = [span for span in spans if span.count == 1 and span.samples and span.sequence.can_speculate]
        budget = self._max_step_tokens - sum(span.count for span in spans)
        if not ahead or budget < len(ahead):
            return
        most = [min(self._allowed(span.sequence), budget // len(ahead)) for span in ahead]
        guesses = self._proposer.propose([span.sequence for span in ahead], most)
        for span, guessed in zip(ahead, guesses, strict=True):
            sequence = span.sequence
            standing = guessed[: self._scheduler.allocate_spare(sequence, len(guessed))]
            sequence.ids += standing
            span.count, span.drafted = 1 + len(standing), len(standing)

    def _allowed(self, sequence: Sequence) -> int:
        """How many guesses a sequence may have now; the last token it may have is never guessed."""
        if sequence.draft_length is None:
            sequence.draft_length = DraftLength(self._guesses)
        left = sequence.spec.max_tokens - sequence.generated - 1
        return max(0, min(sequence.draft_length.current, left, self.node.max_positions - len(sequence.ids)))

    def _settle(self, spans: list[Span], sampled: list[int]) -> list[list[int]]:
        """What each span came to: its new tokens, of the guesses those that stood; the others are cut off."""
        left = iter(sampled)
        found: list[list[int]] = []
        for span in spans:
            tokens = list(islice(left, 1 + span.drafted)) if span.samples else []
            if span.drafted:
                tokens = self._stood(span, tokens)
            found.append(tokens)
        return found

    def _stood(self, span: Span, sampled: list[int]) -> list[int]:
        sequence, counters = span.sequence, self._scheduler.counters
        guessed = sequence.ids[-span.drafted :]
        del sequence.ids[-span.drafted :]
        tokens: list[int] = []
        for token, guess in zip(sampled, [*guessed, None], strict=True):
            tokens.append(token)
            is_last = sequence.spec.finish_reason(token, sequence.generated + len(tokens)) is not None
            if token != guess or is_last:
                break
        counters.drafted += len(guessed)
        counters.accepted += len(tokens) - 1
        assert sequence.draft_length is not None
        sequence.draft_length.update(drafted=len(guessed), accepted=len(tokens) - 1)
        sequence.ids += tokens[:-1]
        span.count, span.drafted = len(tokens), 0
        return tokens

    def _outputs(
        self, spans: list[Span], tokens: list[list[int]], ran: StepResult, failures: dict[str, DalSegnoError]
    ) -> list[Output]:
        outputs: list[Output] = []
        failed: list[str] = []
        asked = 0
        failures |= ran.failures
        scores, prompt_scores = iter(ran.scores), iter(ran.prompt_scores)
        for span, new in zip(spans, tokens, strict=True):
            spec = span.sequence.spec
            of_prompt = (
                [_cut(told, spec) for told in islice(prompt_scores, len(span.scored_positions))]
                if ran.prompt_scores
                else []
            )
            token = new[-1] if new else None
            outputs += self._ahead(span.sequence, new[:-1])
            told = _cut(next(scores), spec) if token is not None and spec.logprobs is not None else None
            if spec.key in ran.failures:
                continue
            asked += bool(of_prompt) or token is not None
            is_last = span.reaches_end and spec.max_tokens == 0
            vector = self._runner.pools[spec.key].vector() if is_last and spec.pooling is not None else None
            asked += vector is not None
            if token == NOT_A_TOKEN or any(isnan(told.logprob) for told in of_prompt) or _is_broken(vector):
                failed.append(spec.key)
                self._scheduler.hide_from_cache(span.sequence)
                continue
            if of_prompt or is_last:
                outputs.append(self._prompt_output(span.sequence, of_prompt, vector, is_last=is_last))
            if token is None:
                continue
            try:
                outputs.append(self._token_output(span.sequence, token, told))
            except Exception as error:  # noqa: BLE001 - one tensor that finds no room must not cost the others
                failures[spec.key] = as_dalsegno_error(error)
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
                f"the model's logits or states are not numbers for {len(failed)} of {asked} sequences; "
                "its weights are damaged, or its dtype is too narrow for it"
            )
        raise StepFailedError(message, keys=failed, outputs=outputs, others=failures)

    def _prompt_output(
        self, sequence: Sequence, scores: list[TokenScore], vector: Array | None, *, is_last: bool
    ) -> PromptOutput:
        spec, finish, cached_tokens = sequence.spec, None, 0
        if is_last:
            finish = FinishReason.LENGTH
            cached_tokens = self._scheduler.cached_tokens(sequence) if spec.caches_prompt else 0
            self._drop([spec.key])
        return PromptOutput(
            key=spec.key,
            scores=tuple(scores),
            finish=finish,
            step=self._number,
            vector=vector,
            cached_tokens=cached_tokens,
        )

    def _ahead(self, sequence: Sequence, stood: list[int]) -> list[Output]:
        """The tokens before a step's last one, which the sequence has already."""
        first = sequence.generated - len(stood)
        return [
            TokenOutput(
                key=sequence.spec.key, token_id=token, index=first + place, finish=None, step=self._number
            )
            for place, token in enumerate(stood)
        ]

    def _token_output(self, sequence: Sequence, token: int, told: TokenScore | None) -> TokenOutput:
        spec, index = sequence.spec, sequence.generated
        sequence.ids.append(token)
        finish, kv = spec.finish_reason(token, index + 1), None
        if finish is not None:
            kv = self._export(sequence)
            self._drop([spec.key])
        return TokenOutput(
            key=spec.key, token_id=token, index=index, finish=finish, step=self._number, score=told, kv=kv
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
                failures[spec.key] = as_dalsegno_error(error)
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


def _is_broken(vector: Array | None) -> bool:
    return vector is not None and not np.isfinite(vector.data.view("<f4")).all()


def _cut(told: TokenScore, spec: SequenceSpec) -> TokenScore:
    """With no more of the likeliest than its sequence asked for: another in the step may want more."""
    return told if len(told.top) == spec.logprobs else replace(told, top=told.top[: spec.logprobs])
