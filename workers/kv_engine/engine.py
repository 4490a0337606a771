"""The KV engine: continuous batching over a paged pool of keys and values. One step is one forward.

    add ── check (sequence_spec, kv_transfer) ── queue (scheduler)
    step ── schedule ── import keys and values ── draft ── launch, read (runner) ── accept drafts ── outputs

Synchronous, and owned by one thread (`workers.kv_engine.thread`). It knows sequences and tokens, but no
requests, text or log.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Final

from shared.errors import BugError, ClientError, DalSegnoError
from shared.telemetry import timeline
from workers.data_plane.port import Array
from workers.kv_engine.adapters import Adapters
from workers.kv_engine.attention.kernels import AttentionKernel
from workers.kv_engine.attention.paged import ATTENTION, observed_windows
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.cache.blocks import BlockManager
from workers.kv_engine.cache.prefault import TURN_S
from workers.kv_engine.config import KVEngineConfig
from workers.kv_engine.counters import EngineStats, WorkCounters
from workers.kv_engine.feeding.sequences import FedSequences
from workers.kv_engine.gpu.cuda_graphs import GraphCapture
from workers.kv_engine.gpu.fusion import prepare_kernels
from workers.kv_engine.gpu.run_ahead import plan_step_ahead
from workers.kv_engine.guide_state import GuideState
from workers.kv_engine.kv_transfer import Allocate, KVTransfer
from workers.kv_engine.node import (
    FULL,
    KVNode,
    adapted_modules_of,
    has_head,
    masks_of,
    position_axes_of,
    position_dtype_of,
    programs_of,
    rotary_change_of,
    token_programs_of,
)
from workers.kv_engine.node_parts import prompt_parts_of
from workers.kv_engine.outputs import EmissionOutput, Output, StepFailedError, as_dalsegno_error
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.lockstep import Followers
from workers.kv_engine.prefill_budget import PrefillBudget
from workers.kv_engine.programs.engine import Programs, keys_of
from workers.kv_engine.programs.passes import PassSpan
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.programs.towers import Tower, Towers
from workers.kv_engine.runner import LaunchedStep, Runner
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.selfcheck import check_node
from workers.kv_engine.sequence import Sequence, Span
from workers.kv_engine.sequence_spec import SequenceSpec
from workers.kv_engine.speculative.drafter import Drafter, accept_drafts
from workers.kv_engine.speculative.payoff import Payoff
from workers.kv_engine.speculative.proposer import Proposer
from workers.kv_engine.step import StepBuilder
from workers.kv_engine.step_outputs import OutputBuilder, StepOutcome
from workers.kv_engine.stream_nodes import is_fed, sends_states
from workers.machine.cores import cores
from workers.machine.cpu_threads import threads_for, use_cpu_threads
from workers.machine.gpu_context import check_context


class KVEngine:
    """Continuous batching of `node`.

    The constructor checks that the paged pool gives the logits of the stock model (`selfcheck.check_node`),
    and our GPU kernels on the device (`gpu.kernel_checks`). On a CPU it sets torch's number of threads, so
    construct the engine in the thread that steps it.

    Args:
        export_to: allocates the slots for exported keys and values; None if none are exported.
        proposer: drafts tokens for speculative decoding; None is without it.
        followers: the other ranks of a TP group. They run each forward, too, for its sums need all ranks.
        capture: records steps as CUDA graphs, which are replayed; with followers, if all of them can record.
        kernel: the attention kernel; the default of the device if None (`attention.kernels.default_kernel`).
        towers: the node's companion models as they are served; None: as the node has them.

    Attributes:
        step_keys: the keys of the sequences in the last step.
        runs_ahead: launch the step after a replayed one before that one is read, where this is possible
            (`workers.kv_engine.gpu.run_ahead`). False with a proposer.
    """

    def __init__(
        self,
        node: KVNode,
        config: KVEngineConfig,
        *,
        export_to: Allocate | None = None,
        proposer: Proposer | None = None,
        followers: Followers | None = None,
        capture: GraphCapture | None = None,
        kernel: AttentionKernel | None = None,
        towers: Mapping[str, Tower] | None = None,
    ) -> None:
        if node.device.type == "cpu":
            use_cpu_threads(threads_for(node.parameters, config.cpu_cores or cores()))
        self.node: Final = node
        self.step_keys: tuple[str, ...] = ()
        self.runs_ahead = proposer is None
        self._work = WorkCounters()
        self._laps = timeline.laps("step")
        self._scheduler = _scheduler(node, config)
        self._sequences: dict[str, Sequence] = {}
        blocks = self._scheduler.blocks
        pass_tokens = config.max_pass_tokens if programs_of(node) or token_programs_of(node) else 0
        # The pool has one block more than the scheduler, for padding.
        slots = blocks.capacity_tokens + config.block_size
        states = config.max_sequences + config.state_snapshots
        self._pool = PagedPool.of(node, slots=slots, kernel=kernel, states=states)
        node.use_attention(ATTENTION)
        prepare_kernels(self._pool, config.block_size)
        adapted = adapted_modules_of(node) if config.adapter_bytes else None
        observing = adapted.observing() if adapted is not None else nullcontext()
        with observing, observed_windows() as windows:
            check_node(node, kernel)
        window = None if followers is not None else _window_of_all(node, windows)
        if window is not None:
            self._scheduler.free_before(window)
        all_towers = Towers(node, self._pool, slots=slots, served=towers)
        self._fed = FedSequences(node) if is_fed(node) else None
        self._adapters = Adapters(adapted, config.adapter_bytes)
        max_blocks = blocks.blocks_for(node.max_positions + pass_tokens)
        if self._scheduler.window is None:
            max_blocks = min(max_blocks, config.num_blocks)
        self._runner = Runner(
            node,
            self._pool,
            StepBuilder(
                max_sequences=config.max_sequences,
                max_step_tokens=config.max_step_tokens + pass_tokens + _max_part_tokens(node, config),
                max_blocks=max_blocks,
                block_size=config.block_size,
                device=node.device,
                padding_block=config.num_blocks,
                position_axes=position_axes_of(node),
                position_dtype=position_dtype_of(node),
                has_states=bool(node.layout.states),
                has_indexers=node.layout.has_indexers,
                has_long_factors=rotary_change_of(node) is not None,
            ),
            towers=all_towers,
            max_sequences=config.max_sequences,
            max_step_tokens=config.max_step_tokens,
            followers=followers,
            capture=capture,
            laps=self._laps,
            fed=self._fed,
            adapters=self._adapters,
        )
        self._programs = Programs(
            node,
            all_towers,
            self._scheduler,
            max_pass_tokens=pass_tokens,
            max_blocks=max_blocks,
            is_shared=followers is not None,
        )
        self._transfer = KVTransfer(
            node, self._pool, block_size=config.block_size, export_to=export_to, followers=followers
        )
        self._outputs = OutputBuilder(self._scheduler, self._runner, self._transfer)
        self._drafter: Drafter | None = None
        if proposer is not None:
            self._drafter = Drafter(
                proposer,
                self._scheduler,
                speculative_tokens=config.speculative_tokens,
                max_step_tokens=config.max_step_tokens,
                max_positions=node.max_positions,
                payoff=Payoff() if config.drafts_have_to_pay else None,
            )
        self._under_way: LaunchedStep | None = None
        self._read_s = 0.0  # the time at which the last step was read

    @property
    def forwards(self) -> int:
        """The number of launched forwards: one per step, of which one may be under way."""
        return self._runner.forwards

    @property
    def has_work(self) -> bool:
        """True if a step would compute or admit anything."""
        return self._under_way is not None or self._scheduler.has_work or self._programs.has_work

    def stats(self) -> EngineStats:
        """Return the state of the engine; other threads may call it."""
        blocks = self._scheduler.blocks
        return EngineStats(
            kernels=self.node.kernels,
            forwards=self.forwards,
            running=len(self._scheduler.running) + self._programs.running,
            waiting=len(self._scheduler.waiting) + self._programs.waiting,
            held=sum(sequence.held for sequence in self._scheduler.running) + self._programs.held,
            kv_used=(blocks.num_blocks - blocks.free) * blocks.block_size,
            kv_evictable=blocks.evictable * blocks.block_size,
            kv_total=blocks.capacity_tokens,
            cache=self._scheduler.counters,
            work=self._work,
        )

    def add_program(self, spec: ProgramSpec) -> None:
        """Queue a run of a program.

        Raises:
            ClientError: its arguments are invalid, or it can never run here.
            DalSegnoError: the node cannot run it.
        """
        if spec.key in self._sequences or spec.key in self._programs:
            raise BugError(f"sequence {spec.key!r} is in the engine already")
        self._programs.add(spec)

    def continue_program(self, given: RunInputs) -> Output | None:
        """Go on with a run that waits for its next iteration; return its outputs if it needs no pass.

        Raises:
            DalSegnoError: there is no such run, or it failed and has left the engine.
        """
        try:
            return self._programs.more(given, step=self.forwards)
        except DalSegnoError:
            self._programs.cancel(given.key)
            raise

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence.

        Raises:
            ClientError: it can never be computed here; nothing was queued.
            TensorGone: the rows of its media are gone; nothing was queued.
            KVMismatchError: the keys and values that it imports do not fit this pool; nothing was queued.
            AdapterError, NoRoomForAdapterError: its adapter cannot be loaded; nothing was queued.
        """
        if spec.key in self._sequences or spec.key in self._programs:
            raise BugError(f"sequence {spec.key!r} is in the engine already")
        if not has_head(self.node):
            raise BugError(f"node {self.node.name!r} has no language head: expected a walk with a program")
        spec.check(self.node.vocab_size, is_fed=self._fed is not None)
        if spec.token_program:
            self._programs.add_sequence(spec)
            self._work.sequences += 1
            return
        self._check_streams(spec)
        sequence = Sequence(spec, rotary_change=rotary_change_of(self.node))
        if spec.adapter is not None:
            sequence.adapter = self._adapters.weights(spec.adapter, self._sequences.values())
        self._add_inputs(sequence)
        if sequence.parts is not None and sequence.parts.lacks_rows(sequence.imported):
            raise BugError(f"sequence {spec.key!r} has media, but their rows did not come")
        self._transfer.check(sequence)
        if spec.is_masked:
            sequence.guide_state = GuideState(spec, self.node.vocab_size)
        self._scheduler.add(sequence)
        self._sequences[spec.key] = sequence
        self._work.sequences += 1

    def feed(self, key: str, items: Array | None, *, ended: bool) -> bool:
        """Give a fed sequence the stream's next items; return False if it is not in the engine.

        Raises:
            TensorGone: the items cannot be read.
        """
        sequence = self._sequences.get(key)
        if sequence is None or self._fed is None:
            return False
        self._fed.feed(sequence, items, ended=ended)
        return True

    def _check_streams(self, spec: SequenceSpec) -> None:
        """Check that the node has what the graph makes it: an end of a stream of tensors."""
        if spec.sends and self._fed is None and not sends_states(self.node):
            raise BugError(
                f"node {self.node.name!r} is to stream {sorted(spec.sends)}, but has neither "
                "forward_with_states nor after_tokens: expected one of them"
            )
        if spec.feed is not None and not spec.feed.ended and self._fed is None:
            raise BugError(
                f"node {self.node.name!r} takes a stream, but has no prompt_rows, after_tokens and "
                "next_rows: expected a fed node"
            )

    def _add_inputs(self, sequence: Sequence) -> None:
        """Add the parts of its prompt, or its rows; whatever fails, such as memory, fails one sequence."""
        try:
            if self._fed is not None:
                self._fed.begin(sequence)
            else:
                sequence.parts = prompt_parts_of(self.node, sequence.spec)
        except Exception as error:
            raise as_dalsegno_error(error) from error

    def cancel(self, key: str) -> bool:
        """Remove a sequence or a run of a program; return False if it is not in the engine (any more)."""
        if self._programs.cancel(key):
            return True
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return False
        self._scheduler.remove(sequence)
        self._runner.forget(key)
        if self._drafter is not None:
            self._drafter.forget(key)
        return True

    def hold(self, key: str) -> bool:
        """Exclude a sequence from all steps; it keeps its row and blocks. Return False if it is not here."""
        return self._set_held(key, held=True)

    def resume(self, key: str) -> bool:
        """Let a held sequence take part in steps again; return False if it is not here."""
        return self._set_held(key, held=False)

    def prepare(self) -> bool:
        """Use some idle milliseconds to commit memory of the pool; return True if there is more to do."""
        return self._pool.prepare(TURN_S)

    def step(self) -> list[Output]:
        """Run one forward and return its outputs; return nothing if there is no work.

        The next step may be under way when this returns. Sequences that are cancelled or held before the next
        call get no output of it.

        Raises:
            StepFailedError: some sequences of the step failed; they have left the engine.
            GroupLostError: a member of the TP group is gone; no further step is possible.
            DeviceLostError: the GPU cannot be used by this process any more.
        """
        begun_s = time.perf_counter()
        if self._laps is not None:
            self._laps.begin()
        launched, spans = self._take_under_way()
        failures: dict[str, DalSegnoError] = {}
        passes: list[PassSpan] = []
        if launched is None:
            spans, passes, failures = self._schedule()
        else:
            begun_s = self._read_s
        self.step_keys = (*(span.sequence.spec.key for span in spans), *keys_of(passes))
        if not spans and not passes:
            made, failed = self._programs.take([], [], step=self.forwards)
            return self._end(StepOutcome(outputs=made, failures=failures | failed))
        if self._laps is not None:
            self._laps.lap("schedule")
        try:
            if launched is None:
                if self._drafter is not None:
                    self._drafter.extend(spans)
                if self._fed is not None:
                    self._fed.fill(spans)
                launched = self._runner.launch(spans, passes)
            ahead = self._launch_ahead(launched, spans)
            result = launched.part_of(launched.read(), spans)
        except GroupLostError:
            raise
        except Exception as error:  # whatever it is, the batch fails and the engine continues
            check_context(self.node.device)
            self._drop([*self.step_keys, *failures])
            raise StepFailedError(
                f"engine step {launched.number if launched else self.forwards} failed: "
                f"{type(error).__name__}: {error}",
                keys=self.step_keys,
                others=failures,
            ) from error
        if self._laps is not None:
            self._laps.lap("sample")
        self._under_way, self._read_s = ahead, time.perf_counter()
        took_s = self._read_s - begun_s
        # Counted before rejected drafts are cut off: they were computed, too.
        computed = self._computed(spans, passes, took_s=took_s)
        tokens = accept_drafts(spans, result.tokens, self._scheduler.counters, self._drafter)
        made, failed = self._programs.take(passes, result.pass_results, step=launched.number)
        sampled = sum(map(len, tokens)) + _emitted(made)
        self._work.count_step(
            sequences=len(spans) + len(passes), computed=computed, sampled=sampled, took_s=took_s
        )
        for span, tie in zip(spans, result.ties, strict=False):
            if tie is not None:
                span.sequence.bind(span.start + tie)
        self._scheduler.advance(spans, took_s, [(one.key, one.span.count) for one in passes])
        values = self._fed.take(spans, result.made) if self._fed is not None and result.made else ()
        outcome = self._outputs.build(
            spans, tokens, result, failures | failed, step=launched.number, values=values
        )
        outcome.outputs += made
        outputs = self._end(outcome)
        if self._laps is not None:
            self._laps.end(rows=len(spans), computed=computed, sampled=sampled)
        return outputs

    def _computed(self, spans: list[Span], passes: list[PassSpan], *, took_s: float) -> int:
        """Return how many tokens a step computed; tell its duration to what learns from it."""
        pass_tokens = sum(one.span.count for one in passes)
        computed = sum(span.count for span in spans) + pass_tokens
        prompts = sum(span.count for span in spans if not span.is_decode) + pass_tokens
        if self._scheduler.prefill_budget is not None:
            self._scheduler.prefill_budget.observe(
                decodes=computed - prompts, prefill_tokens=prompts, took_s=took_s
            )
        if self._drafter is not None and not prompts:
            self._drafter.observe_step(computed, took_s)
        return computed

    def _schedule(self) -> tuple[list[Span], list[PassSpan], dict[str, DalSegnoError]]:
        """Return the spans and passes of the next step, and the errors of those that cannot be computed."""
        scheduled = self._scheduler.schedule()
        decodes = sum(span.is_decode for span in scheduled)
        prompt_tokens = sum(span.count for span in scheduled if not span.is_decode)
        passes, failures = self._programs.schedule(decodes=decodes, prompt_tokens=prompt_tokens)
        self._pool.mark_used(self._scheduler.blocks.high_water * self._scheduler.blocks.block_size)
        failures |= self._transfer.import_all(span.sequence for span in scheduled)
        return [span for span in scheduled if span.sequence.spec.key not in failures], passes, failures

    def _take_under_way(self) -> tuple[LaunchedStep | None, list[Span]]:
        """Return the step under way, and its spans without sequences that have left or are held since."""
        launched, self._under_way = self._under_way, None
        if launched is None:
            return None, []
        spans = [
            span
            for span in launched.spans
            if self._sequences.get(span.sequence.spec.key) is span.sequence and not span.sequence.held
        ]
        self._work.discarded_tokens += len(launched.spans) - len(spans)
        return (launched, spans) if spans else (None, [])

    def _launch_ahead(self, launched: LaunchedStep, spans: list[Span]) -> LaunchedStep | None:
        """Launch the next step already, unless it depends on the tokens of this one."""
        if not self.runs_ahead or launched.tokens is None or self._programs.has_work:
            return None
        planned = plan_step_ahead(spans, self._scheduler)
        if planned is None:
            return None
        self._work.ahead += 1
        return self._runner.launch_after(launched, planned)

    def _end(self, outcome: StepOutcome) -> list[Output]:
        """Remove the sequences that ended with the step, and return its outputs."""
        if any(not isinstance(error, ClientError) for error in outcome.failures.values()):
            check_context(self.node.device)
        self._drop(outcome.ended)
        outcome.raise_failures()
        return outcome.outputs

    def _drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.cancel(key)

    def _set_held(self, key: str, *, held: bool) -> bool:
        if self._programs.hold(key, held=held):
            return True
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        if self._fed is not None:
            self._fed.pause(sequence, paused=held)
        else:
            sequence.held = held
            sequence.work.hold(held=held)
        return True


def _emitted(outputs: Iterable[Output]) -> int:
    """The number of tokens that token programs have emitted."""
    return sum(len(output.token_ids) for output in outputs if isinstance(output, EmissionOutput))


def _scheduler(node: KVNode, config: KVEngineConfig) -> Scheduler:
    budget: PrefillBudget | None = None
    if config.decode_slowdown_limit is not None:
        budget = PrefillBudget(
            decode_slowdown_limit=config.decode_slowdown_limit, min_tokens=config.block_size
        )
    return Scheduler(
        BlockManager(config.num_blocks, config.block_size),
        max_sequences=config.max_sequences,
        max_step_tokens=config.max_step_tokens,
        max_positions=node.max_positions,
        prefix_cache=config.prefix_cache,
        prefill_budget=budget,
        max_part_tokens=_max_part_tokens(node, config),
        state_snapshots=config.state_snapshots if node.layout.states else None,
        has_bounds=node.layout.has_indexers,
        rotary_change=rotary_change_of(node),
    )


def _window_of_all(node: KVNode, windows: Mapping[int, int | None]) -> int | None:
    """Return the window before which no layer of the node reads a key; None if any may.

    `windows` were observed in the self-check. On a GPU, kernels and recorded steps have tables of the pool's
    size, so all blocks are kept.
    """
    is_plain = not (programs_of(node) or token_programs_of(node) or is_fed(node) or node.layout.states)
    if node.device.type != "cpu" or not is_plain or set(windows) != set(range(node.layout.layers)):
        return None
    found = [window for window in windows.values() if window is not None]
    return max(found) if found and len(found) == len(windows) else None


def _max_part_tokens(node: KVNode, config: KVEngineConfig) -> int:
    """Return how many tokens a step may have in addition, for parts of prompts that are never cut."""
    return min(node.max_positions, config.max_pass_tokens) if FULL in masks_of(node) else 0
