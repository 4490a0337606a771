"""Decode steps as CUDA graphs: their launches are recorded once and replayed for later steps.

    build ── body: embed, layers, head ── adjust, mask ── sampler ── tokens
             recorded once per bucket     not recorded   recorded per bucket and kind

A step in which every sequence samples one token without drafts is padded to the next *bucket* of rows and
replayed. Of other steps, the layers are replayed if the steps are short
(`workers.kv_engine.gpu.prompt_graphs`). Between the two recordings the logits are in a buffer, where masks
and penalties are applied. So guided and adjusted sequences are replayed, too, and log probabilities can be
read.

A recording contains addresses and launches, and no values. Lengths, blocks, seeds and filters are read from
the step's buffers (`workers.kv_engine.step`) at the replay, and the results are written to buffers here. All
recordings share one memory pool, so only one is replayed at a time.

A model that cannot be recorded (for example because its experts read token counts on the host) runs
unrecorded, and the log says why. Nothing here needs CUDA except `CudaCapture`.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

from workers.kv_engine.attention.kernels import PlanningKernel, RecordedKernel
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.gpu.host_reads import RefuseHostReads
from workers.kv_engine.gpu.token_sampler import sample
from workers.kv_engine.node import KVNode
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.sequence import Span
from workers.kv_engine.step import Step, StepBuilder

_LOGGER: Final = logging.getLogger(__name__)

Replay = Callable[[], None]
_Recorded = TypeVar("_Recorded")


class GraphCapture(Protocol):
    """The recorder of launches; tests replace it."""

    def capture(self, compute: Callable[[], None]) -> Replay:
        """Record what `compute` launches, and return a function that launches it again over the same memory.

        `compute` is first run for warm-up. It must read and write memory that keeps its address.
        """
        ...


class CudaCapture:
    """CUDA graphs on a device, all in one memory pool. Create it in the thread that replays them.

    Each function runs twice for warm-up: the first run compiles kernels and allocates workspaces, the second
    one finds operations that cannot be recorded (`workers.kv_engine.gpu.host_reads`).

    A kernel keeps the priority of the stream on which it was recorded. So recordings are made on a stream
    with the priority of the thread's own stream (`workers.kv_engine.gpu.cuda_streams`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device: Final = device
        self._stream: Final = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            device, priority=torch.cuda.current_stream(device).priority
        )
        self._pool: Final = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Replay:
        with torch.cuda.device(self._device):
            outside = torch.cuda.current_stream()
            self._stream.wait_stream(outside)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.stream(self._stream):
                    compute()
                    with RefuseHostReads():
                        compute()
                outside.wait_stream(self._stream)
                # Other threads may allocate concurrently; that is not part of the recording.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    compute()
            except Exception:
                # torch leaves the thread on the capture's stream if the capture cannot be ended.
                torch.cuda.set_stream(outside)
                raise
        return graph.replay


def fastest_s(replays: Items[Replay], device: torch.device, *, rounds: int = 5) -> list[float]:
    """Return the fastest seconds of each; rounds go in turns, so that all see the same clocks."""
    taken_s: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for replay, taken in zip(replays, taken_s, strict=True):
            _wait(device)
            begun_s = time.perf_counter()
            replay()
            _wait(device)
            taken.append(time.perf_counter() - begun_s)
    return list(map(min, taken_s))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def buckets(most: int) -> list[int]:
    """Return the recorded numbers of rows, up to `most`.

    They are 1, 2, 4, 8, then each power of two and the middle to the next one.
    """
    doubled = [1 << place for place in range(most.bit_length())]
    halfway = [3 * size // 2 for size in doubled if size >= 16]
    return sorted({*(size for size in (*doubled, *halfway) if size <= most), most})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A recorded step of a number of rows.

    All recorded steps share their result buffers, which are valid until the next replay.

    Attributes:
        body: replays embedding, layers and head.
        samplers: replay the sampler; the key is (any row is random, any random row is filtered).
    """

    rows: int
    body: Replay
    samplers: Mapping[tuple[bool, bool], Replay]
    hidden: torch.Tensor  # (rows, hidden)
    logits: torch.Tensor  # (rows, vocab) float32
    tokens: torch.Tensor  # (rows,) int64

    def forward(self, spans: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay the body, and return the hidden states and logits of the spans without padding."""
        self.body()
        return self.hidden[:spans], self.logits[:spans]

    def sample(self, sampling: SamplingRows) -> torch.Tensor:
        """Replay the sampler over the logits buffer, and return the tokens of the sampled rows, (S,)."""
        self.samplers[sampling.is_random, sampling.is_filtered]()
        return self.tokens[: len(sampling.draw_index)]


def _first_cause(error: BaseException) -> BaseException:
    """The error behind CUDA's message that a capture failed because of an earlier one."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of all members of a TP group to a question.

    Attributes:
        yes: how many said yes.
        members: how many there are.
    """

    yes: int
    members: int

    @property
    def are_all(self) -> bool:
        return self.yes == self.members

    @property
    def differ(self) -> bool:
        return 0 < self.yes < self.members


class Group(Protocol):
    """The other members of a TP group, which record the same steps."""

    def ask(self, question: str, answer: bool) -> Answers:
        """Exchange answers with all members, which ask the same question.

        Raises:
            GroupLostError: a member is lost, or asks another question.
        """
        ...

    def lost(self, why: str) -> Exception:
        """Return the error that restarts all members."""
        ...


class OtherMemberError(RuntimeError):
    """Another member of the group could not compute or record a step."""


def computed_layers(node: KVNode, pool: PagedPool, step: Step, group: Group | None) -> torch.Tensor:
    """Return the hidden states of a step, (T, hidden); members of a group tell each other whether they could.

    Raises:
        GroupLostError: some members could not: from now on their sums would belong to other operations.
    """
    failure: RuntimeError | None = None
    try:
        with attention_context(pool, step):
            hidden = node.forward(node.embed(step.token_ids), step)
    except RuntimeError as error:
        failure = error
    if group is not None and group.ask("are the layers computed", failure is None).differ:
        raise group.lost(
            f"some members could not compute a step to record it ({failure or 'this one could'}); a smaller "
            "kv_tokens or max_sequences frees memory"
        ) from failure
    if failure is not None:
        raise failure
    return hidden


def agreed(compute: Callable[[], None], group: Group | None) -> Callable[[], None]:
    """Return `compute` as a group records it: after each call, members say whether it succeeded.

    So a head of the leader that finds no memory stops all members at the same place.
    """
    if group is None:
        return compute

    def computed() -> None:
        failure: RuntimeError | None = None
        try:
            compute()
        except RuntimeError as error:
            failure = error
        if not group.ask("is the step computed", failure is None).are_all:
            raise failure or OtherMemberError("another member of the group could not compute the step")

    return computed


def record_each(
    sizes: Items[int],
    record: Callable[[int], _Recorded],
    architecture: str,
    unit: str,
    group: Group | None = None,
) -> dict[int, _Recorded]:
    """Record steps of each size, the largest first, because the others then fit into its memory.

    Sizes for which there is no memory are left out, and so are all if the model cannot be recorded; the log
    says so.

    Args:
        sizes: ascending.
        record: records one size.
        architecture: of the model, for the log.
        unit: of the sizes, for the log.
        group: the other members of a TP group: what one of them could not record is left out by all.
    """
    begun_s = time.perf_counter()
    recorded: dict[int, _Recorded] = {}
    for size in reversed(sizes):
        made, is_possible = None, True
        try:
            made = record(size)
        except torch.OutOfMemoryError:
            _LOGGER.warning(
                "too little memory to record steps of %d %s: they run unrecorded, which is slower; "
                "a smaller kv_tokens or max_sequences frees memory",
                size,
                unit,
            )
        except OtherMemberError:
            _LOGGER.warning(
                "another member of the group could not record steps of %d %s: its log says why", size, unit
            )
        except RuntimeError as error:
            why = str(_first_cause(error)).partition("\n")[0]
            _LOGGER.warning(
                "steps of %s cannot be recorded (%s): they run unrecorded, which is slower", architecture, why
            )
            is_possible = False
        if group is not None:
            made = made if group.ask("is the step recorded", made is not None).are_all else None
            is_possible = group.ask("can others be recorded", is_possible).are_all
        if made is not None:
            recorded[size] = made
        if not is_possible:
            break
    said, took_s = ", ".join(map(str, sorted(recorded))) or "no", time.perf_counter() - begun_s
    _LOGGER.info("recorded steps of %s %s in %.1f s", said, unit, took_s)
    return recorded


def stands_for_media(span: Span) -> bool:
    """True if tokens of the span stand for a medium: their rows are in no buffer of a recording."""
    parts = span.sequence.parts
    return parts is not None and parts.changes(span.start, span.count)


class DecodeGraphs:
    """The recorded steps of one engine.

    The constructor records all of them.

    Args:
        key: the node's part of the random key.
        group: as in `record_each`.

    Attributes:
        sizes: the rows of the recorded steps, ascending.
    """

    def __init__(
        self,
        node: KVNode,
        pool: PagedPool,
        builder: StepBuilder,
        capture: GraphCapture,
        *,
        max_sequences: int,
        key: int,
        group: Group | None = None,
    ) -> None:
        self._node = node
        self._pool = pool
        self._builder = builder
        self._key = key
        self._group = group
        self._hidden: torch.Tensor | None = None  # (max_sequences, hidden), in the node's dtype
        self._logits = torch.empty(max_sequences, node.vocab_size, dtype=torch.float32, device=node.device)
        self._tokens = torch.empty(max_sequences, dtype=torch.int64, device=node.device)
        self._recorded: Final[dict[int, RecordedStep]] = record_each(
            buckets(max_sequences), partial(self._record, capture), node.architecture, "rows", group
        )
        self.sizes: Final = sorted(self._recorded)

    def recorded(self, spans: Items[Span]) -> RecordedStep | None:
        """Return the recorded step that computes these spans; None if they must run unrecorded."""
        if not self.sizes or len(spans) > self.sizes[-1]:
            return None
        if any(span.count != 1 or not span.samples or span.scored_positions for span in spans):
            return None
        # The last token of a prompt may stand for a medium.
        if any(stands_for_media(span) for span in spans):
            return None
        return self._recorded[self.sizes[bisect_left(self.sizes, len(spans))]]

    @torch.inference_mode()
    def _record(self, capture: GraphCapture, rows: int) -> RecordedStep:
        self._builder.build([], rows=rows)  # padding only
        if isinstance(self._pool.kernel, PlanningKernel):
            kernel = self._pool.kernel.recorded()
            body = capture.capture(partial(self._run_body, rows, self._pool.with_kernel(kernel)))
            body = partial(self._plan_and_replay, rows, kernel, body)
        else:
            body = capture.capture(agreed(partial(self._run_body, rows, self._pool), self._group))
        samplers = {
            kind: capture.capture(partial(self._run_sampler, rows, *kind))
            for kind in ((True, True), (True, False), (False, False))
        }
        assert self._hidden is not None
        return RecordedStep(
            rows=rows,
            body=body,
            samplers=samplers,
            hidden=self._hidden[:rows],
            logits=self._logits[:rows],
            tokens=self._tokens[:rows],
        )

    def _plan_and_replay(self, rows: int, kernel: RecordedKernel, replay: Replay) -> None:
        """Plan the step in the kernel, then replay the body."""
        kernel.plan(self._builder.captured(rows))
        replay()

    def _run_body(self, rows: int, pool: PagedPool) -> None:
        """Compute a step's hidden states and logits into the buffers."""
        step = self._builder.captured(rows)
        hidden = computed_layers(self._node, pool, step, self._group)
        logits = self._node.head(hidden, step.logit_indices)
        if self._hidden is None:
            self._hidden = hidden.new_empty(len(self._tokens), hidden.shape[-1])
        self._hidden[:rows].copy_(hidden)
        self._logits[:rows].copy_(logits)

    def _run_sampler(self, rows: int, is_random: bool, is_filtered: bool) -> None:
        """Sample the tokens into the buffer. Rows without a filter use one that keeps every token."""
        step = self._builder.captured(rows, is_random=is_random, is_filtered=is_filtered)
        self._tokens[:rows].copy_(sample(self._logits[:rows], step.sampling, self._key))
