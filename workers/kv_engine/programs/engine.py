"""The runs of programs in one engine: admission, the passes of each step, and their results.

    add ── driver ── wait for rows and blocks ── passes ── step ── take ── passes ── ... ── outputs

A run starts when the pool has room for all that its driver declares, so it never waits for room here later,
and is never preempted. It may wait for its other ranks, and keeps its room meanwhile: a walk in which runs of
several ranks need one another lets them start in one order. While a run waits for room, no sequence that came
later is admitted. In each step the runs take turns: the one that has waited longest comes first. A pass is
never split. Called in the engine's thread.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import torch

from models.programs import Driver, Pass
from shared.errors import BugError, ClientError, DalSegnoError, WorkerError
from workers.data_plane.arrays import to_tensor
from workers.kv_engine.node import KVNode, position_axes_of, programs_of, token_programs_of, vocab_size_of
from workers.kv_engine.outputs import Output, as_dalsegno_error
from workers.kv_engine.programs.checks import PassChecks
from workers.kv_engine.programs.contexts import Contexts
from workers.kv_engine.programs.pages import Pages
from workers.kv_engine.programs.passes import PassSpan, commit, make_span
from workers.kv_engine.programs.runs import Run, TensorReports
from workers.kv_engine.programs.spec import ProgramSpec, RunInputs
from workers.kv_engine.programs.tokens import TokenReports, check_sequence, token_request
from workers.kv_engine.programs.towers import Towers
from workers.kv_engine.scheduler import Scheduler
from workers.kv_engine.sequence_spec import SequenceSpec

P = TypeVar("P")
_LOGGER: Final = logging.getLogger(__name__)

_MAX_LOGITS: Final = 1 << 28
"""The most logits of the passes of one step, a GiB of them, unless one pass asks for more."""
_SPARE_BLOCKS: Final = 2
"""Each context but the first may leave a part of a further block empty, and copy a part of a shared one."""


class Programs:
    """All runs of an engine.

    Args:
        node: runs the programs in its `programs` and `token_programs`.
        towers: the node's pool, and its companion models.
        max_pass_tokens: the most tokens that the passes of one step have together.
        max_blocks: the most blocks of a context.
        is_shared: the node is shared by a TP group, whose other members know no programs.
    """

    def __init__(
        self,
        node: KVNode,
        towers: Towers,
        scheduler: Scheduler,
        *,
        max_pass_tokens: int,
        max_blocks: int,
        is_shared: bool,
    ) -> None:
        self._node = node
        self._towers = towers
        self._checks = PassChecks(towers.nodes, max_tokens=max_pass_tokens)
        self._scheduler = scheduler
        self._max_pass_tokens = max_pass_tokens
        self._max_blocks = max_blocks
        self._is_shared = is_shared
        self._axes: Final = position_axes_of(node)
        self._runs: dict[str, Run] = {}
        self._steps = 0

    def __contains__(self, key: str) -> bool:
        return key in self._runs

    @property
    def running(self) -> int:
        """The number of runs that have their contexts."""
        return sum(run.contexts is not None for run in self._runs.values())

    @property
    def waiting(self) -> int:
        """The number of runs that wait for room."""
        return len(self._runs) - self.running

    @property
    def has_work(self) -> bool:
        """True if a step would compute a pass, or admit a run."""
        if any(run.contexts is not None and run.is_able for run in self._runs.values()):
            return True
        return any(self._fits(run) for run in self._in_order()[:1])

    @property
    def held(self) -> int:
        """The number of runs that are held and have their contexts."""
        return sum(run.held and run.contexts is not None for run in self._runs.values())

    @torch.inference_mode()
    def add(self, spec: ProgramSpec) -> None:
        """Start a run, as soon as there is room.

        Raises:
            ClientError: it can never run here, or its arguments are invalid.
            DalSegnoError: the driver could not be made.
        """
        program = self._named(programs_of(self._node), spec.program)
        try:
            inputs = {name: to_tensor(array, self._node.device) for name, array in spec.inputs.items()}
            driver = program(self._node, inputs, spec.args, seed=spec.seed)
            if spec.state and not self._resumed(driver, spec):
                driver = program(self._node, inputs, spec.args, seed=spec.seed)
        except Exception as error:
            raise as_dalsegno_error(error) from error
        self._queue(Run(spec, driver, TensorReports(spec.key, driver), self._scheduler.next_arrival()))

    @torch.inference_mode()
    def more(self, given: RunInputs, *, step: int) -> Output | None:
        """Go on with a run that waits for the node call of its next iteration.

        Args:
            given: the inputs of the call.
            step: the number of the last step.

        Returns:
            the outputs of the call, if it needs no pass.

        Raises:
            BugError: there is no such run.
            DalSegnoError: the driver failed; the run is to be cancelled.
        """
        run = self._runs.get(given.key)
        if run is None:
            raise BugError(f"no run {given.key!r} waits for the next iteration of its loop")
        try:
            inputs = {name: to_tensor(array, self._node.device) for name, array in given.inputs.items()}
            output = run.more(inputs, step)
            if output is None:
                self._next_round(run)
        except Exception as error:
            raise as_dalsegno_error(error) from error
        return output

    @torch.inference_mode()
    def add_sequence(self, spec: SequenceSpec) -> None:
        """Start a run that generates the tokens of a sequence, as soon as there is room.

        Raises:
            ClientError: it can never run here, or asks for what the program cannot do.
            DalSegnoError: the driver could not be made.
        """
        program = self._named(token_programs_of(self._node), spec.token_program)
        check_sequence(spec)
        self._scheduler.check_length(len(spec.prompt_ids), spec.max_tokens)
        try:
            driver = program(self._node, token_request(spec))
        except Exception as error:
            raise as_dalsegno_error(error) from error
        reports = TokenReports(spec, vocab_size_of(self._node))
        self._queue(Run(spec, driver, reports, self._scheduler.next_arrival()))

    def _resumed(self, driver: Driver, spec: ProgramSpec) -> bool:
        """Give a driver its checkpoint; return False if it cannot use it: then it has to begin anew."""
        resume = getattr(driver, "resume", None)
        if resume is None:
            return False
        try:
            resume({name: to_tensor(array, self._node.device) for name, array in spec.state.items()})
        except Exception:  # a state of another version of the family
            _LOGGER.warning(
                "run %s starts from its inputs: its checkpoint cannot be used", spec.key, exc_info=True
            )
            return False
        return True

    def _named(self, known: Mapping[str, P], name: str) -> P:
        if name not in known:
            raise BugError(f"node {self._node.name!r} has no program {name!r}; it has {sorted(known)}")
        if self._is_shared:
            raise WorkerError(
                f"node {self._node.name!r} is shared by tensor parallelism, which cannot run programs: leave "
                "tp_size away",
                code="program_on_shared_node",
            )
        return known[name]

    def _queue(self, run: Run) -> None:
        driver, most_rows, pool = run.driver, self._scheduler.max_sequences, self._scheduler.blocks
        try:
            if (fit := getattr(driver, "fit", None)) is not None:
                fit(most_rows, pool.capacity_tokens, _SPARE_BLOCKS * pool.block_size)
            rows, blocks = self._needs(run)
            self._checks.check_length(getattr(driver, "longest_pass", 0))
        except Exception as error:
            raise as_dalsegno_error(error) from error
        if rows > most_rows or blocks > pool.num_blocks:
            raise ClientError(
                f"the request needs {rows} contexts and {driver.max_tokens} tokens of the KV cache, which "
                f"has {most_rows} rows and {pool.capacity_tokens} tokens; ask for less, or raise "
                "max_sequences and kv_tokens",
                code="context_length_exceeded",
            )
        self._runs[run.spec.key] = run
        self._scheduler.enter(run.spec.tenant)
        self._set_barrier()

    def cancel(self, key: str) -> bool:
        """Remove a run and free its room; return False if there is none."""
        run = self._runs.pop(key, None)
        if run is None:
            return False
        self._scheduler.leave(run.spec.tenant)
        if run.contexts is not None:
            self._scheduler.release(run.contexts.rows, run.contexts.pages.reserved)
        self._scheduler.end_work(key, run.spec.work)
        self._set_barrier()
        return True

    def hold(self, key: str, *, held: bool) -> bool:
        """Hold a run, or let it go on; return False if there is none."""
        run = self._runs.get(key)
        if run is None:
            return False
        run.held = held
        run.spec.work.hold(held=held)
        return True

    @torch.inference_mode()
    def schedule(
        self, *, decodes: int, prompt_tokens: int
    ) -> tuple[list[PassSpan], dict[str, DalSegnoError]]:
        """Admit runs, and return the passes of the next step, and the errors of runs that failed.

        Args:
            decodes: the sequences of the step that decode; passes next to them are limited like prompts,
                except for the first one.
            prompt_tokens: the prompt tokens of the step.
        """
        if not self._runs:
            return [], {}
        failures: dict[str, DalSegnoError] = {}
        self._admit(failures)
        self._steps += 1
        left = self._max_pass_tokens
        budget = self._scheduler.prefill_budget
        soft = left
        if decodes and budget is not None:
            soft = budget.tokens_with_decodes(decodes, 0) - prompt_tokens
        passes: list[PassSpan] = []
        logits = _MAX_LOGITS // max(vocab_size_of(self._node), 1)
        able = (run for run in self._runs.values() if run.is_able)
        for run in sorted(able, key=lambda one: (one.served, one.arrival)):
            for asked in run.waiting.values():
                wanted = len(asked.logits or ())
                if asked.tokens > left or (passes and (asked.tokens > soft or wanted > logits)):
                    continue
                try:
                    passes.append(self._span(run, asked))
                except Exception as error:  # noqa: BLE001 - a driver's mistake must not fail other runs
                    failures[run.spec.key] = as_dalsegno_error(error)
                    break
                left, soft, run.served = left - asked.tokens, soft - asked.tokens, self._steps
                logits -= wanted
        for key in failures:
            self.cancel(key)
        return self._towers.in_order([one for one in passes if one.key not in failures]), failures

    @torch.inference_mode()
    def take(
        self, passes: Sequence[PassSpan], results: Sequence[torch.Tensor], *, step: int
    ) -> tuple[list[Output], dict[str, DalSegnoError]]:
        """Give drivers the results of their passes; return their outputs, and the errors of failed runs.

        A driver whose round has no passes takes no results.
        """
        outputs: list[Output] = []
        failures: dict[str, DalSegnoError] = {}
        touched: dict[str, Run] = {}
        for one, result in zip(passes, results, strict=True):
            run = self._runs.get(one.key)
            if run is None:
                continue  # cancelled meanwhile
            commit(one)
            self._scheduler.count_served(run.spec.tenant, one.span.count)
            place = next(place for place, asked in run.waiting.items() if asked is one.asked)
            del run.waiting[place]
            run.taken[place] = result
            touched[one.key] = run
        touched |= {key: run for key, run in self._runs.items() if run.is_due}
        rows = len(self._scheduler.running) + len(touched)
        for key, run in touched.items():
            run.spec.work.count_step(rows)
            if run.waiting:
                continue
            try:
                output = run.take(step)
                if output is not None:
                    outputs.append(output)
                if output is None or output.finish is None:
                    if not run.parked:
                        self._next_round(run)
                    continue
            except Exception as error:  # noqa: BLE001 - a driver's error fails its run alone
                failures[key] = as_dalsegno_error(error)
            self.cancel(key)
        return outputs, failures

    # ---- admission ---------------------------------------------------------------------------------
    def _in_order(self) -> list[Run]:
        waiting = (run for run in self._runs.values() if run.contexts is None)
        return sorted(waiting, key=self._order)

    def _order(self, run: Run) -> tuple[float, float, int, int]:
        return -run.spec.priority, run.deadline, self._scheduler.served(run.spec.tenant), run.arrival

    def _needs(self, run: Run) -> tuple[int, int]:
        """The rows and blocks of a run."""
        contexts = run.driver.max_contexts
        blocks = self._scheduler.blocks.blocks_for(run.driver.max_tokens)
        return contexts, blocks + _SPARE_BLOCKS * (contexts - 1)

    def _fits(self, run: Run) -> bool:
        rows, blocks = self._needs(run)
        return self._scheduler.can_reserve(rows, blocks)

    def _admit(self, failures: dict[str, DalSegnoError]) -> None:
        ordered = self._in_order()
        for place, run in enumerate(ordered):
            if not self._fits(run):
                self._note_waits(ordered[place:])
                break
            needs = self._needs(run)
            rows, blocks = self._scheduler.reserve(*needs)
            run.contexts = Contexts(
                run.spec.key,
                rows=rows,
                pages=Pages(blocks),
                block_size=self._scheduler.blocks.block_size,
                max_blocks=self._max_blocks,
                copy_cells=partial(self._towers.copy_cells, block_size=self._scheduler.blocks.block_size),
                pool_name=self._towers.pool_name,
            )
            run.spec.work.admit()
            try:
                self._next_round(run)
            except Exception as error:  # noqa: BLE001 - a driver's error fails its run alone
                failures[run.spec.key] = as_dalsegno_error(error)
        self._set_barrier()

    def _note_waits(self, waiting: Sequence[Run]) -> None:
        """Record behind whom runs wait for rows and blocks, unless that is known."""
        if all(run.spec.work.lacked for run in waiting):
            return
        behind = [sequence.spec.key for sequence in self._scheduler.running]
        behind += [key for key, run in self._runs.items() if run.contexts is not None]
        for run in waiting:
            run.spec.work.wait_for("kv_blocks", behind)
            behind.append(run.spec.key)
        for sequence in self._scheduler.waiting:
            if sequence.arrival > waiting[0].arrival:  # behind the barrier
                sequence.work.wait_for("kv_blocks", behind)

    def _set_barrier(self) -> None:
        """Let no sequence that came after the first waiting run be admitted before it."""
        self._scheduler.barrier = min((run.arrival for run in self._in_order()), default=None)

    # ---- passes ------------------------------------------------------------------------------------
    def _next_round(self, run: Run) -> None:
        asked = list(run.driver.passes())
        self._checks.check_round(asked)
        contexts = run.contexts
        assert contexts is not None
        for one in asked:
            contexts.open(one)  # before any of them changes: a fork begins with what was committed before
        for one in asked:
            if one.after is not None:
                contexts.of(one).set_length(one.after)
        run.waiting, run.taken = dict(enumerate(asked)), {}

    def _span(self, run: Run, asked: Pass) -> PassSpan:
        assert run.contexts is not None
        context = run.contexts.of(asked)
        run.contexts.make_room(context, asked.tokens)
        return make_span(run.spec.key, asked, context, axes=self._axes)


def keys_of(passes: Iterable[PassSpan]) -> list[str]:
    """The keys of the runs that have passes in a step, each once."""
    return list(dict.fromkeys(one.key for one in passes))
