"""Forwards, launched and read: what a step computes, up to its tokens.

    build ── embed, layers ── head ── adjust, mask ── sample ── tokens ··· read
    └──────────────────────── launch ────────────────────────┘

On a GPU a launch waits for nothing that it launches. So the step behind one that is replayed
(`workers.kv_engine.gpu.cuda_graphs`) can be launched before that is read: its tokens are taken where they lie on
the device. All of it is launched on one stream, and whatever is launched later finds done what was launched
before. On a CPU a launch has computed when it returns.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Final

import torch

from shared.errors import ClientError, DalSegnoError
from shared.telemetry.timeline import Laps
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.failures import as_dalsegno_error
from workers.kv_engine.gpu.cuda_graphs import DecodeGraphs, GraphCapture
from workers.kv_engine.node import KVNode
from workers.kv_engine.outputs import TokenScore
from workers.kv_engine.parallel.lockstep import Followers
from workers.kv_engine.sampling.grammar_masks import GuideThread, StepMasks
from workers.kv_engine.sampling.logits_processors import adjust
from workers.kv_engine.sampling.logprobs import score
from workers.kv_engine.sampling.pooling import StatePooler
from workers.kv_engine.sampling.sampler import NOT_A_TOKEN, node_key, sample
from workers.kv_engine.sequence import Span
from workers.kv_engine.step import StepBuilder, UnreadTokens

_NOT_READ: Final = 0
"""Stands in a sequence for a token that is on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a forward came to: sampled tokens, and the scores asked for; each in the order of the spans.

    `failures`: sequences whose token is none, and why.
    """

    tokens: list[int]
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    failures: dict[str, DalSegnoError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A forward that is under way.

    Attributes:
        number: of all forwards, from 1.
        read: waits for what it comes to; called once at most. Raises what it failed of.
        tokens: of one that is replayed, where its tokens lie until the next one is launched: (S,) int64.
    """

    number: int
    spans: list[Span]
    read: Callable[[], StepResult]
    tokens: torch.Tensor | None = None

    def tokens_of(self, spans: Items[Span], ran: StepResult) -> list[int]:
        """Of what it came to, the tokens of these of its spans; some may be missing where each has one."""
        if len(spans) == len(self.spans):
            return ran.tokens
        wanted = set(spans)
        return [token for span, token in zip(self.spans, ran.tokens, strict=True) if span in wanted]


class Runner:
    """Runs the steps of one engine over `node` and its `pool`.

    Args:
        builder: makes the steps' tensors, for `max_sequences` sequences and `max_step_tokens` tokens at most.
        followers: who runs each forward too, where the node is a part of one.
        capture: who records the steps of decodes, which are replayed then; not where there are followers.
        laps: who is told what a step is doing.

    Attributes:
        forwards: how many were launched.
        poolers: the states of prompts that are pooled, as far as they are computed.
    """

    def __init__(
        self,
        node: KVNode,
        pool: PagedPool,
        builder: StepBuilder,
        *,
        max_sequences: int,
        max_step_tokens: int,
        followers: Followers | None,
        capture: GraphCapture | None,
        laps: Laps | None,
    ) -> None:
        self.forwards = 0
        self.poolers: Final[dict[str, StatePooler]] = {}
        self._node = node
        self._pool = pool
        self._builder = builder
        self._followers = followers
        self._laps = laps
        self._guides = GuideThread(
            max_sequences=max_sequences, vocab_size=node.vocab_size, device=node.device
        )
        self._node_key = node_key(node.name)
        self._arrivals = _Arrivals(max(max_sequences, max_step_tokens), node.device)
        self._graphs: DecodeGraphs | None = None
        if capture is not None and followers is None:
            self._graphs = DecodeGraphs(
                node, pool, builder, capture, max_sequences=max_sequences, key=self._node_key
            )

    def launch(self, spans: list[Span]) -> LaunchedStep:
        """Launch one forward; whatever was launched before has been read."""
        self.forwards += 1
        return self._launch(spans, None)

    def launch_after(self, before: LaunchedStep, spans: list[Span]) -> LaunchedStep:
        """Launch the forward behind one that is replayed and not read yet.

        Every one of `spans` is of one token: the one that `before` samples for its sequence. What goes wrong
        is raised when it is read, for until then it is no one's concern.
        """
        assert before.tokens is not None, "its tokens lie nowhere"
        self.forwards += 1
        place = {span.sequence: place for place, span in enumerate(before.spans)}
        unread = UnreadTokens(tokens=before.tokens, places=[place[span.sequence] for span in spans])
        for span in spans:
            span.sequence.ids.append(_NOT_READ)
        try:
            return self._launch(spans, unread)
        except Exception as error:  # noqa: BLE001 - raised again by who reads
            return LaunchedStep(number=self.forwards, spans=spans, read=partial(_raise, error))
        finally:
            for span in spans:
                del span.sequence.ids[-1]

    def forget(self, key: str) -> None:
        """A sequence is gone."""
        self.poolers.pop(key, None)

    @torch.inference_mode()
    def _launch(self, spans: list[Span], unread: UnreadTokens | None) -> LaunchedStep:
        recorded = self._graphs.recorded(spans) if self._graphs is not None else None
        rows = recorded.rows if recorded is not None else 0
        step = self._builder.build(spans, rows=rows, unread=unread)
        masks = self._guides.begin(spans)
        if self._laps is not None:
            self._laps.lap("build")
        if recorded is not None:
            hidden, logits = recorded.forward(len(spans))
        else:
            with (
                attention_context(self._pool, step),
                self._followers.computing(step) if self._followers is not None else nullcontext(),
            ):
                hidden = self._node.forward(self._node.embed(step.token_ids), step)
        self._fold(spans, hidden)
        if self._laps is not None:
            self._laps.lap("forward")
        wanted, scores, prompt_scores = step.scored, list[TokenScore](), list[TokenScore]()
        sizes = {"top": wanted.top if wanted else 0, "vocab_size": self._node.vocab_size}
        if wanted and wanted.prompt_ids.numel():
            prompt_scores = score(
                lambda at: self._node.head(hidden, at), wanted.prompt_indices, wanted.prompt_ids, **sizes
            )
        if not step.logit_indices.numel():
            return LaunchedStep(
                number=self.forwards, spans=spans, read=partial(_end_of, hidden, prompt_scores)
            )
        if recorded is None:
            logits = self._node.head(hidden, step.logit_indices)
        is_changed = step.adjusted is not None or masks is not None
        # What is scored are the logits as the model made them.
        made = logits.clone() if is_changed and wanted else logits
        if step.adjusted is not None:
            adjust(logits, step.adjusted)
        failures = masks.apply(logits) if masks is not None else {}
        if recorded is not None:
            tokens = recorded.sample(step.sampling)
        else:
            tokens = sample(logits, step.sampling, self._node_key)
        if wanted and wanted.sampled.numel():
            taken = tokens.index_select(0, wanted.sampled)
            scores = score(lambda at: made.index_select(0, at), wanted.sampled, taken, **sizes)
        arriving = self._arrivals.begin(tokens)

        def read() -> StepResult:
            ran = StepResult(tokens=arriving(), scores=scores, prompt_scores=prompt_scores)
            if masks is not None:
                ran.failures.update({key: as_dalsegno_error(error) for key, error in failures.items()})
                _find_stuck(masks, ran, lambda row: self._node.head(hidden, step.logit_indices[row, None]))
            return ran

        return LaunchedStep(
            number=self.forwards, spans=spans, read=read, tokens=tokens if recorded is not None else None
        )

    def _fold(self, spans: Items[Span], hidden: torch.Tensor) -> None:
        """Take the states of prompts that are pooled, each once."""
        offset = 0
        for span in spans:
            spec, unreported = span.sequence.spec, span.unreported
            if spec.pooling is not None:
                pool = self.poolers.setdefault(spec.key, StatePooler(spec.pooling))
                first = offset + unreported.start - span.start
                pool.add(hidden[first : offset + span.count], unreported.start)
            offset += span.count


class _Arrivals:
    """Tokens on their way to the host: to two places in turns, for two steps may be under way.

    Args:
        most: tokens of a step.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        self._places = cycle([_Place(most), _Place(most)]) if device.type == "cuda" else None

    def begin(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Send them, (S,) int64; what is given waits for them."""
        if self._places is None:
            found: list[int] = tokens.tolist()
            return lambda: found
        return next(self._places).begin(tokens)


class _Place:
    """Pinned memory for the tokens of a step."""

    def __init__(self, most: int) -> None:
        self._tokens = torch.empty(most, dtype=torch.int64, pin_memory=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        here = self._tokens[: len(tokens)]
        here.copy_(tokens, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(tokens.device))
        return partial(self._wait, here)

    def _wait(self, here: torch.Tensor) -> list[int]:
        self._arrived.synchronize()
        found: list[int] = here.tolist()
        return found


def _end_of(hidden: torch.Tensor, prompt_scores: list[TokenScore]) -> StepResult:
    """Of a step that samples nothing: nothing is read back, but what it takes is learned from."""
    if hidden.is_cuda:
        torch.cuda.current_stream(hidden.device).synchronize()
    return StepResult(tokens=[], prompt_scores=prompt_scores)


def _raise(error: Exception) -> StepResult:
    raise error


@torch.inference_mode()
def _find_stuck(masks: StepMasks, ran: StepResult, logits_of: Callable[[int], torch.Tensor]) -> None:
    """Tell those whom guide and bans leave nothing from those whose model makes no numbers."""
    for row, key in zip(masks.rows, masks.keys, strict=True):
        if ran.tokens[row] == NOT_A_TOKEN and logits_of(row).max().isfinite():
            ran.failures[key] = ClientError(
                "bad_words: with them there is no token left to choose that the guide allows",
                code="nothing_left",
            )
