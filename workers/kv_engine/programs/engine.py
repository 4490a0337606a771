"""The runs of programs in one engine: admission, the passes of each step, and their results.

    add ── driver ── wait for rows and blocks ── passes ── step ── take ── passes ── ... ── outputs

A run starts when the pool has room for all that its driver declares, so it never waits for room later and
is never preempted. While a run waits for room, no sequence that came later is admitted. In each step the runs
take turns: the one that has waited longest comes first. A pass is never split. Called in the engine's thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from models.programs import Driver, Mask, Pass
from shared.errors import BugError, ClientError, DalSegnoError, WorkerError
from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import FULL, KVNode, masks_of, position_axes_of, programs_of
from workers.kv_engine.outputs import ProgramOutput, StepFailedError, as_dalsegno_error
from workers.kv_engine.programs.contexts import Contexts
from workers.kv_engine.programs.pages import Pages
from workers.kv_engine.programs.passes import PassSpan, commit, make_span
from workers.kv_engine.programs.spec import ProgramSpec
from workers.kv_engine.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class _Run:
    """A live run of a program.

    Attributes:
        contexts: None while it waits for room.
        waiting: the passes of this round that were not computed yet, by their place in it.
        taken: the states of those that were.
        served: the number of the last step with one of its passes.
    """

    spec: ProgramSpec
    driver: Driver
    arrival: int
    contexts: Contexts | None = None
    waiting: dict[int, Pass] = field(default_factory=dict)
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    served: int = 0


class Programs:
    """All runs of an engine.

    Args:
        node: runs the programs in its `programs`.
        max_pass_tokens: the most tokens that the passes of one step have together.
        max_blocks: the most blocks of a context.
        is_shared: the node is shared by a TP group, whose other members know no programs.
    """

    def __init__(
        self,
        node: KVNode,
        pool: PagedPool,
        scheduler: Scheduler,
        *,
        max_pass_tokens: int,
        max_blocks: int,
        is_shared: bool,
    ) -> None:
        self._node = node
        self._pool = pool
        self._scheduler = scheduler
        self._max_pass_tokens = max_pass_tokens
        self._max_blocks = max_blocks
        self._is_shared = is_shared
        self._axes: Final = position_axes_of(node)
        self._runs: dict[str, _Run] = {}
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
        """True if a step would compute a pass."""
        return self.running > 0 or any(self._fits(run) for run in self._in_order()[:1])

    @torch.inference_mode()
    def add(self, spec: ProgramSpec) -> None:
        """Start a run, as soon as there is room.

        Raises:
            ClientError: it can never run here, or its arguments are invalid.
            DalSegnoError: the driver could not be made.
        """
        known = programs_of(self._node)
        program = known.get(spec.program)
        if program is None:
            raise BugError(
                f"node {self._node.name!r} has no program {spec.program!r}; it has {sorted(known)}"
            )
        if self._is_shared:
            raise WorkerError(
                f"node {self._node.name!r} is shared by tensor parallelism, which cannot run programs: leave "
                "tp_size away",
                code="program_on_shared_node",
            )
        try:
            inputs = {name: to_tensor(array, self._node.device) for name, array in spec.inputs.items()}
            driver: Driver = program(self._node, inputs, spec.args, seed=spec.seed)
            run = _Run(spec, driver, arrival=self._scheduler.next_arrival())
            rows, blocks = self._needs(run)
        except Exception as error:
            raise as_dalsegno_error(error) from error
        most_rows, pool = self._scheduler.max_sequences, self._scheduler.blocks
        if rows > most_rows or blocks > pool.num_blocks:
            raise ClientError(
                f"the request needs {rows} contexts and {driver.max_tokens} tokens of the KV cache, which "
                f"has {most_rows} rows and {pool.capacity_tokens} tokens; ask for less, or raise "
                "max_sequences and kv_tokens",
                code="context_length_exceeded",
            )
        self._runs[spec.key] = run
        self._set_barrier()

    def cancel(self, key: str) -> bool:
        """Remove a run and free its room; return False if there is none."""
        run = self._runs.pop(key, None)
        if run is None:
            return False
        if run.contexts is not None:
            self._scheduler.release(run.contexts.rows, run.contexts.pages.reserved)
        self._set_barrier()
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
        for run in sorted(self._runs.values(), key=lambda one: (one.served, one.arrival)):
            for asked in run.waiting.values():
                if asked.tokens > left or (passes and asked.tokens > soft):
                    continue
                try:
                    passes.append(self._span(run, asked))
                except Exception as error:  # noqa: BLE001 - a driver's mistake must not fail other runs
                    failures[run.spec.key] = as_dalsegno_error(error)
                    break
                left, soft, run.served = left - asked.tokens, soft - asked.tokens, self._steps
        for key in failures:
            self.cancel(key)
        return [one for one in passes if one.key not in failures], failures

    @torch.inference_mode()
    def take(
        self, passes: Sequence[PassSpan], states: Sequence[torch.Tensor], *, step: int
    ) -> tuple[list[ProgramOutput], dict[str, DalSegnoError]]:
        """Give drivers the states of their passes; return the outputs of ended runs, and the errors."""
        outputs: list[ProgramOutput] = []
        failures: dict[str, DalSegnoError] = {}
        touched: dict[str, _Run] = {}
        for one, hidden in zip(passes, states, strict=True):
            run = self._runs.get(one.key)
            if run is None:
                continue  # cancelled meanwhile
            commit(one)
            self._scheduler.count_served(run.spec.tenant, one.span.count)
            place = next(place for place, asked in run.waiting.items() if asked is one.asked)
            del run.waiting[place]
            run.taken[place] = hidden
            touched[one.key] = run
        for key, run in touched.items():
            if run.waiting:
                continue
            try:
                values = run.driver.take([run.taken[place] for place in sorted(run.taken)])
                if values is None:
                    self._next_round(run)
                    continue
                outputs.append(ProgramOutput(key=key, values=_arrays(values), step=step))
            except Exception as error:  # noqa: BLE001 - a driver's error fails its run alone
                failures[key] = as_dalsegno_error(error)
            self.cancel(key)
        return outputs, failures

    # ---- admission ---------------------------------------------------------------------------------
    def _in_order(self) -> list[_Run]:
        waiting = (run for run in self._runs.values() if run.contexts is None)
        return sorted(waiting, key=lambda run: (-run.spec.priority, run.arrival))

    def _needs(self, run: _Run) -> tuple[int, int]:
        """The rows and blocks of a run: each context may leave a part of its last block empty."""
        contexts = run.driver.max_contexts
        return contexts, self._scheduler.blocks.blocks_for(run.driver.max_tokens) + contexts

    def _fits(self, run: _Run) -> bool:
        rows, blocks = self._needs(run)
        return self._scheduler.can_reserve(rows, blocks)

    def _admit(self, failures: dict[str, DalSegnoError]) -> None:
        for run in self._in_order():
            if not self._fits(run):
                break
            needs = self._needs(run)
            rows, blocks = self._scheduler.reserve(*needs)
            run.contexts = Contexts(
                run.spec.key,
                rows=rows,
                pages=Pages(blocks),
                block_size=self._scheduler.blocks.block_size,
                max_blocks=self._max_blocks,
                copy_cells=self._copy_cells,
            )
            try:
                self._next_round(run)
            except Exception as error:  # noqa: BLE001 - a driver's error fails its run alone
                failures[run.spec.key] = as_dalsegno_error(error)
        self._set_barrier()

    def _set_barrier(self) -> None:
        """Let no sequence that came after the first waiting run be admitted before it."""
        self._scheduler.barrier = min((run.arrival for run in self._in_order()), default=None)

    # ---- passes ------------------------------------------------------------------------------------
    def _next_round(self, run: _Run) -> None:
        asked = list(run.driver.passes())
        names = [one.context for one in asked]
        if not asked or len(set(names)) != len(names):
            raise BugError(
                f"a program asked for passes of {names}: expected at least one, of different contexts"
            )
        assert run.contexts is not None
        for one in asked:
            self._check(one)
            run.contexts.open(one)  # now: a fork begins with what was committed before this round
        run.waiting, run.taken = dict(enumerate(asked)), {}

    def _check(self, asked: Pass) -> None:
        if (asked.ids is None) == (asked.embeds is None) or not asked.tokens:
            raise BugError("a pass needs ids or embeds, one of them, of at least one token")
        if asked.ids is not None and not 0 <= min(asked.ids) <= max(asked.ids) < self._node.vocab_size:
            raise BugError(
                f"a pass has token ids from {min(asked.ids)} to {max(asked.ids)}: expected them below "
                f"{self._node.vocab_size}"
            )
        if asked.embeds is not None and asked.embeds.dim() != 2:
            raise BugError(
                f"a pass has embeddings of shape {tuple(asked.embeds.shape)}: expected (tokens, hidden)"
            )
        if asked.mask is Mask.FRAMES and (asked.frame_tokens < 1 or asked.tokens % asked.frame_tokens):
            raise BugError(
                f"a pass of {asked.tokens} tokens has frames of {asked.frame_tokens}: expected whole frames"
            )
        if asked.mask is not Mask.CAUSAL and FULL not in masks_of(self._node):
            raise BugError(
                f"a pass has the mask {asked.mask}, but node {self._node.name!r} declares only "
                f"{sorted(masks_of(self._node))}: expected {FULL!r} among its masks"
            )
        if asked.tokens > self._max_pass_tokens:
            raise ClientError(
                f"the request needs a forward pass of {asked.tokens} tokens, which is not split; the most is "
                f"{self._max_pass_tokens} (model_kwargs.max_pass_tokens): ask for a smaller output, or raise "
                "it",
                code="pass_too_long",
            )

    def _span(self, run: _Run, asked: Pass) -> PassSpan:
        assert run.contexts is not None
        context = run.contexts.of(asked)
        run.contexts.make_room(context, asked.tokens)
        return make_span(run.spec.key, asked, context, axes=self._axes)

    def _copy_cells(self, source: int, target: int, cells: int) -> None:
        size = self._scheduler.blocks.block_size
        for layer in (*self._pool.keys, *self._pool.values):
            layer[target * size : target * size + cells] = layer[source * size : source * size + cells]


def _arrays(values: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """The outputs of a run in main memory.

    Raises:
        StepFailedError: an output is not a number.
    """
    broken = [
        name
        for name, value in values.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    if broken:
        raise WorkerError(
            f"the outputs {sorted(broken)} of the program are not numbers; the weights are damaged, or the "
            "dtype is too narrow for the model",
            code=StepFailedError.code,
        )
    return {name: to_array(value.clone()) for name, value in values.items()}


def keys_of(passes: Iterable[PassSpan]) -> list[str]:
    """The keys of the runs that have passes in a step, each once."""
    return list(dict.fromkeys(one.key for one in passes))
