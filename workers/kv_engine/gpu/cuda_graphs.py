"""Steps of decodes in CUDA graphs: what a step launches is recorded once, and launched again as one.

    build ── body: embed, layers, head ── adjust, mask ── sampler ── tokens
             recorded once per bucket     as they come    recorded per bucket and kind

A step in which every sequence has one token, sampled and not guessed, is padded to the next *bucket* of rows
and replayed; any other step runs as it comes. Between the two recordings logits lie in a buffer, where masks
and penalties reach them: so guided and adjusted sequences are replayed too, and scored ones are looked at.

What is recorded are addresses and launches, never numbers: lengths, blocks, seeds and filters are read from
the step's buffers (`workers.kv_engine.step`) when it is replayed, and what comes of it lies in buffers here.
All recordings share one pool of memory, so one is replayed at a time.

A model that cannot be recorded (its experts ask the host how many tokens each has got, say) is run as it
comes, and the log says why. Nothing here needs CUDA: who records is a `GraphCapture`.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch

from workers.kv_engine.attention.kernels import PlanningKernel, RecordedKernel
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.node import Node
from workers.kv_engine.sampling.sampler import sample
from workers.kv_engine.sampling.sampling_rows import SamplingRows
from workers.kv_engine.sequence import Span
from workers.kv_engine.step import StepBuilder

_LOGGER: Final = logging.getLogger(__name__)

Replay = Callable[[], None]
_WARM_UPS: Final = 2
"""Kernels are compiled and workspaces allocated in the first round; the second shows that nothing is left."""


class GraphCapture(Protocol):
    """Who records."""

    def capture(self, compute: Callable[[], None]) -> Replay:
        """Record what `compute` launches; what is given launches it again, over the same memory.

        `compute` is run first, until it is warm, and reads and writes memory that stays where it is.
        """
        ...


class CudaCapture:
    """CUDA graphs on a device, all of one pool of memory; make it in the thread that replays them.

    A kernel keeps the priority of the stream it was recorded on, wherever it is replayed: so they are
    recorded on a stream with the priority of the thread's own (`workers.kv_engine.gpu.cuda_streams`).
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
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    compute()
            outside.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process go on meanwhile: what they allocate is no part of this.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                compute()
        return graph.replay


def buckets(most: int) -> list[int]:
    """How many rows are recorded for: 1, 2, 4, 8, and each power of two and what lies half way, to `most`."""
    doubled = [1 << place for place in range(most.bit_length())]
    halfway = [3 * size // 2 for size in doubled if size >= 16]
    return sorted({*(size for size in (*doubled, *halfway) if size <= most), most})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step of so many rows. What it comes to lies in buffers that all of them share, until the next replay.

    Attributes:
        body: the replay of embedding, layers and head; `samplers`, those of the sampler, by whether any row
            is random and whether any of these is filtered.
    """

    rows: int
    body: Replay
    samplers: Mapping[tuple[bool, bool], Replay]
    hidden: torch.Tensor  # (rows, hidden)
    logits: torch.Tensor  # (rows, vocab) float32
    tokens: torch.Tensor  # (rows,) int64

    def forward(self, spans: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay it up to the logits: hidden states and logits of the spans that are no padding."""
        self.body()
        return self.hidden[:spans], self.logits[:spans]

    def sample(self, sampling: SamplingRows) -> torch.Tensor:
        """Replay the sampler over the logits as they lie there now: the tokens of the rows sampled, (S,)."""
        self.samplers[sampling.is_random, sampling.is_filtered]()
        return self.tokens[: len(sampling.draw_index)]


class DecodeGraphs:
    """The recorded steps of one engine.

    Making one records all of them, the largest first: the others find room in its memory.

    Args:
        key: of the node's randomness.

    Attributes:
        sizes: how many rows the recorded steps have, ascending.
    """

    def __init__(
        self, node: Node, pool: PagedPool, builder: StepBuilder, capture: GraphCapture, *, max_sequences: int, key: int
    ) -> None:
        self._node = node
        self._pool = pool
        self._builder = builder
        self._key = key
        self._hidden: torch.Tensor | None = None  # (max_sequences, hidden), as the node makes them
        self._logits = torch.empty(max_sequences, node.vocab_size, dtype=torch.float32, device=node.device)
        self._tokens = torch.empty(max_sequences, dtype=torch.int64, device=node.device)
        self._recorded: dict[int, RecordedStep] = {}
        self._record_all(capture, max_sequences)
        self.sizes: Final = sorted(self._recorded)

    def recorded(self, spans: Items[Span]) -> RecordedStep | None:
        """The step that computes these; None where they are computed as they come."""
        if not self.sizes or len(spans) > self.sizes[-1]:
            return None
        if any(span.count != 1 or not span.samples or span.scored_positions for span in spans):
            return None
        return self._recorded[self.sizes[bisect_left(self.sizes, len(spans))]]

    def _record_all(self, capture: GraphCapture, max_sequences: int) -> None:
        begun_s = time.perf_counter()
        for rows in reversed(buckets(max_sequences)):
            try:
                self._recorded[rows] = self._record(capture, rows)
            except torch.OutOfMemoryError:
                _LOGGER.warning(
                    "too little memory to record steps of %d rows: they run as they come, which is slower; "
                    "a smaller kv_tokens or max_sequences leaves room",
                    rows,
                )
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                _LOGGER.warning(
                    "steps of %s cannot be recorded (%s): they run as they come, which is slower",
                    self._node.architecture,
                    why,
                )
                break
        sizes, took_s = ", ".join(map(str, sorted(self._recorded))) or "no", time.perf_counter() - begun_s
        _LOGGER.info("steps of decodes recorded: of %s rows, in %.1f s", sizes, took_s)

    @torch.inference_mode()
    def _record(self, capture: GraphCapture, rows: int) -> RecordedStep:
        self._builder.build([], rows=rows)  # nothing but padding
        if isinstance(self._pool.kernel, PlanningKernel):
            kernel = self._pool.kernel.recorded()
            body = capture.capture(partial(self._run_body, rows, self._pool.with_kernel(kernel)))
            body = partial(self._plan_and_replay, rows, kernel, body)
        else:
            body = capture.capture(partial(self._run_body, rows, self._pool))
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
        """Replay a body whose kernel has to be told of the step first."""
        kernel.plan(self._builder.captured(rows))
        replay()

    def _run_body(self, rows: int, pool: PagedPool) -> None:
        """The body of a step, into the buffers."""
        step = self._builder.captured(rows)
        with attention_context(pool, step):
            hidden = self._node.forward(self._node.embed(step.token_ids), step)
        logits = self._node.head(hidden, step.logit_indices)
        if self._hidden is None:
            self._hidden = hidden.new_empty(len(self._tokens), hidden.shape[-1])
        self._hidden[:rows].copy_(hidden)
        self._logits[:rows].copy_(logits)

    def _run_sampler(self, rows: int, is_random: bool, is_filtered: bool) -> None:
        """The sampler behind it; a filter that a row has not is one that keeps everything."""
        step = self._builder.captured(rows, is_random=is_random, is_filtered=is_filtered)
        self._tokens[:rows].copy_(sample(self._logits[:rows], step.sampling, self._key))
