"""Execution of steps on the device: launch a forward, and read its tokens later.

    build ── embed, layers ── head ── adjust, mask ── sample ── tokens ··· read
    └──────────────────────── launch ────────────────────────┘

On a GPU a launch is asynchronous. So the step after a replayed one (`workers.kv_engine.gpu.cuda_graphs`) can
be launched before the replayed one is read: it takes its input tokens from the device. All launches are on
one stream, so each one finds the results of the earlier ones. On a CPU a launch computes before it returns.
"""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Final

import torch

from models.feeding import AfterTokens
from shared.errors import ClientError, DalSegnoError
from shared.telemetry.timeline import Laps
from workers.kv_engine.adapters import Adapters, uses_adapters
from workers.kv_engine.attention.paged import attention_context
from workers.kv_engine.attention.pool import PagedPool
from workers.kv_engine.feeding.sequences import FedSequences
from workers.kv_engine.gpu.cuda_graphs import DecodeGraphs, GraphCapture, RecordedStep
from workers.kv_engine.gpu.prompt_graphs import PromptGraphs
from workers.kv_engine.gpu.token_sampler import sample
from workers.kv_engine.node import KVNode, head_of, vocab_size_of
from workers.kv_engine.node_parts import forward_with_states, inputs_of
from workers.kv_engine.outputs import StateOutput, TokenScore, as_dalsegno_error
from workers.kv_engine.parallel.lockstep import CAN_RECORD, UNRECORDED, Followers, RecordingSize
from workers.kv_engine.programs.passes import PassSpan, add_passes, results_of
from workers.kv_engine.programs.towers import Towers
from workers.kv_engine.sampling.grammar_masks import GuideThread, StepMasks
from workers.kv_engine.sampling.logits_processors import adjust
from workers.kv_engine.sampling.logprobs import begin_score, score
from workers.kv_engine.sampling.pooling import StatePooler
from workers.kv_engine.sampling.sampler import NOT_A_TOKEN, node_key
from workers.kv_engine.sampling.sampling_state import UnreadTokens
from workers.kv_engine.sent_states import sends_any, states_to_send
from workers.kv_engine.sequence import Span
from workers.kv_engine.step import Step, StepBuilder
from workers.kv_engine.stream_nodes import sends_states

_LOGGER: Final = logging.getLogger(__name__)
_PLACEHOLDER: Final = 0
"""The id in a sequence of a token that is known only on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The result of a forward.

    Attributes:
        tokens: the sampled tokens, in the order of the spans.
        scores: the scores of those tokens whose sequences request them.
        prompt_scores: the scores of prompt tokens, in the order of the spans.
        pass_results: the states or logits of the passes of programs, in their order (`results_of`).
        made: what a fed node made of the sampled tokens.
        states: the tensors per computed token that go into streams.
        ties: of each span, its first token whose choice of keys depends on the prompt's length, or None;
            empty for a node without indexers.
        failures: the errors of sequences without a valid token, by key.
    """

    tokens: list[int]
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    pass_results: list[torch.Tensor] = field(default_factory=list)
    failures: dict[str, DalSegnoError] = field(default_factory=dict)
    made: AfterTokens | None = None
    states: list[StateOutput] = field(default_factory=list)
    ties: Items[int | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A forward that is under way.

    Attributes:
        number: its number among all forwards, from 1.
        read: waits for the result, or raises the error of the forward; called at most once.
        tokens: (S,) int64, the sampled tokens of a replayed step on the device, until the next launch; None
            for other steps, and with followers.
    """

    number: int
    spans: list[Span]
    read: Callable[[], ForwardResult]
    tokens: torch.Tensor | None = None

    def part_of(self, result: ForwardResult, spans: Items[Span]) -> ForwardResult:
        """Return the tokens and scores of a part of its spans. It is a part only if each has one token."""
        if len(spans) == len(self.spans):
            return result
        wanted = set(spans)
        tokens = [token for span, token in zip(self.spans, result.tokens, strict=True) if span in wanted]
        scored = [span for span in self.spans if span.sequence.spec.logprobs is not None]
        scores = [one for span, one in zip(scored, result.scores, strict=True) if span in wanted]
        return replace(result, tokens=tokens, scores=scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """What the layers of a step gave.

    Attributes:
        hidden: (T, hidden) of the packed tokens; of a replayed step, (S, hidden) of those that are sampled.
        logits: (S, vocab) float32 of a replayed step; None if the head is still to be called.
        states: the tensors per token that go into streams, by edge.
        ties: as in `ForwardResult`.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ties: Items[int | None] = ()


class Runner:
    """Runs the steps of one engine over `node` and its `pool`.

    Args:
        builder: makes the tensors of a step, for at most `max_sequences` sequences and `max_step_tokens`
            tokens.
        followers: the other ranks of a TP group, which run each forward, too.
        capture: records steps, which are replayed; with followers, if all of them can record.
        fed: the sequences of a fed node, whose steps are not replayed; None for any other node.
        towers: the companion models of the node, and their pools.
        adapters: the LoRA adapters of the node; steps that use them are not replayed.

    Attributes:
        poolers: the pooled hidden states of prompts so far, by key.
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
        fed: FedSequences | None = None,
        towers: Towers | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.forwards = 0
        self.poolers: Final[dict[str, StatePooler]] = {}
        self._node = node
        self._pool = pool
        self._builder = builder
        self._towers = towers
        self._adapters = adapters or Adapters(None, 0)
        self._followers = followers
        self._laps = laps
        self._fed = fed
        self._guides = GuideThread(
            max_sequences=max_sequences, vocab_size=vocab_size_of(node), device=node.device
        )
        self._node_key = node_key(node.name)
        self._sends_states = sends_states(node)
        self._arrivals = _Arrivals(max(max_sequences, max_step_tokens), node.device)
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None
        capture = capture if fed is None else None
        if followers is not None:
            can = capture is not None and pool.has_static_kernel
            if not followers.ask(CAN_RECORD, can).are_all and capture is not None:
                _LOGGER.info(
                    "steps of the group are not recorded: %s",
                    "another member cannot" if can else "its attention kernel plans on the host",
                )
                capture = None
        if capture is not None:
            self._graphs = DecodeGraphs(
                node,
                pool,
                builder,
                capture,
                max_sequences=max_sequences,
                key=self._node_key,
                group=followers,
            )
            if self._graphs.sizes and pool.has_static_kernel:
                self._prompts = PromptGraphs(
                    node, pool, builder, capture, max_step_tokens=max_step_tokens, group=followers
                )

    def launch(self, spans: list[Span], passes: Items[PassSpan] = ()) -> LaunchedStep:
        """Launch one forward over spans of sequences and passes of programs; all earlier ones are read.

        The passes of towers, the last ones, are computed first, in forwards of their own.
        """
        self.forwards += 1
        own = [one for one in passes if not one.asked.tower]
        if len(own) == len(passes):
            return self._launch(spans, None, own)
        assert self._towers is not None, "only passes of known towers are scheduled"
        with torch.inference_mode():
            results = self._towers.results(self._builder, passes)
        if not spans and not own:
            read = partial(_finish, results[0], [], results, list)
            return LaunchedStep(number=self.forwards, spans=[], read=read)
        return self._launch(spans, None, own, results)

    def launch_after(self, before: LaunchedStep, spans: list[Span]) -> LaunchedStep:
        """Launch the forward after a replayed one that is not read yet.

        Each of `spans` is one token: the token that `before` samples for its sequence. An error of the launch
        is raised by `LaunchedStep.read`, for the caller has yet to read `before`.
        """
        assert before.tokens is not None, "only a replayed step has its tokens on the device"
        self.forwards += 1
        place = {span.sequence: place for place, span in enumerate(before.spans)}
        unread = UnreadTokens(tokens=before.tokens, places=[place[span.sequence] for span in spans])
        for span in spans:
            span.sequence.ids.append(_PLACEHOLDER)
        try:
            return self._launch(spans, unread)
        except Exception as error:  # noqa: BLE001 - raised again by `read`
            return LaunchedStep(number=self.forwards, spans=spans, read=partial(_raise, error))
        finally:
            for span in spans:
                del span.sequence.ids[-1]

    def forget(self, key: str) -> None:
        """Drop the state of a sequence that has left the engine."""
        self.poolers.pop(key, None)

    @torch.inference_mode()
    def _launch(
        self,
        spans: list[Span],
        unread: UnreadTokens | None,
        passes: Items[PassSpan] = (),
        of_towers: Items[torch.Tensor] = (),
    ) -> LaunchedStep:
        """Launch a forward of the node; `of_towers` are the results of the passes after `passes`."""
        recorded, size = (None, 0) if passes else self._recording_of(spans)
        rows = recorded.rows if recorded is not None else 0
        step = self._builder.build(
            [*spans, *(one.span for one in passes)], rows=rows, tokens=size, unread=unread
        )
        if passes:
            step = add_passes(step, passes)
        masks = self._guides.begin(spans)
        self._lap("build")
        computed = self._compute(spans, step, recorded, size)
        hidden = computed.hidden
        self._pool_states(spans, hidden)
        pass_results = [*results_of(passes, hidden, partial(head_of, self._node)), *of_towers]
        self._lap("forward")
        prompt_scores = self._prompt_scores(step, hidden)
        if step.logit_indices.numel():
            return self._launch_sampling(spans, step, recorded, computed, masks, prompt_scores, pass_results)
        states = partial(states_to_send, spans, computed.states, step=self.forwards)
        read = partial(_finish, hidden, prompt_scores, pass_results, states, computed.ties)
        return LaunchedStep(number=self.forwards, spans=spans, read=read)

    def _recording_of(self, spans: list[Span]) -> tuple[RecordedStep | None, int]:
        """Return the recording of these spans, or the size of the one of their layers; (None, 0) without."""
        if self._graphs is None or uses_adapters(spans) or self._sends(spans):
            return None, 0
        recorded = self._graphs.recorded(spans)
        if recorded is not None or self._prompts is None:
            return recorded, 0
        return None, self._prompts.size_of(spans)

    def _sends(self, spans: list[Span]) -> bool:
        return self._sends_states and sends_any(spans)

    def _compute(self, spans: list[Span], step: Step, recorded: RecordedStep | None, size: int) -> _Computed:
        """Compute the layers, and the logits: replayed, or called."""
        if recorded is not None:
            with self._with_followers(step, RecordingSize(rows=recorded.rows)):
                hidden, logits = recorded.forward(len(spans))
            return _Computed(hidden=hidden, logits=logits)
        if size:
            assert self._prompts is not None, "it has named the size"
            with self._with_followers(step, RecordingSize(tokens=size)):
                return _Computed(hidden=self._prompts.forward(size, len(step.token_ids)))
        states: Mapping[str, torch.Tensor] = {}
        with (
            attention_context(self._pool, step) as attended,
            self._adapters.computing(spans),
            self._with_followers(step),
        ):
            if self._sends(spans):
                hidden, states = forward_with_states(self._node, step)
            else:
                hidden = self._node.forward(inputs_of(self._node, step), step)
        ties = attended.ties() if self._node.layout.has_indexers else ()
        return _Computed(hidden=hidden, states=states, ties=ties)

    def _with_followers(self, step: Step, size: RecordingSize = UNRECORDED) -> AbstractContextManager[None]:
        if self._followers is None:
            return nullcontext()
        return self._followers.computing(step, size)

    def _prompt_scores(self, step: Step, hidden: torch.Tensor) -> list[TokenScore]:
        wanted = step.scored
        if wanted is None or not wanted.prompt_ids.numel():
            return []
        sizes = {"top": wanted.top, "vocab_size": vocab_size_of(self._node)}
        head = partial(self._node.head, hidden)
        return score(head, wanted.prompt_indices, wanted.prompt_ids, **sizes)

    def _launch_sampling(
        self,
        spans: list[Span],
        step: Step,
        recorded: RecordedStep | None,
        computed: _Computed,
        masks: StepMasks | None,
        prompt_scores: list[TokenScore],
        pass_results: list[torch.Tensor],
    ) -> LaunchedStep:
        """Launch the adjustments, masks and sampler of a step, and the copy of its tokens to the host."""
        hidden, number = computed.hidden, self.forwards
        logits = computed.logits
        if logits is None:
            logits = self._node.head(hidden, step.logit_indices)
        wanted = step.scored
        is_changed = step.adjusted is not None or masks is not None
        # Scores are of the logits before any change.
        raw = logits.clone() if is_changed and wanted else logits
        if step.adjusted is not None:
            adjust(logits, step.adjusted)
        failures = masks.apply(logits) if masks is not None else {}
        if recorded is not None:
            tokens = recorded.sample(step.sampling)
        else:
            tokens = sample(logits, step.sampling, self._node_key)
        scores: Callable[[], list[TokenScore]] = list
        if wanted and wanted.sampled.numel():
            taken = tokens.index_select(0, wanted.sampled)
            sizes = {"top": wanted.top, "vocab_size": vocab_size_of(self._node)}
            scores = begin_score(lambda at: raw.index_select(0, at), wanted.sampled, taken, **sizes)
        made: AfterTokens | None = None
        if self._fed is not None:
            made = self._fed.after_tokens(spans, tokens, hidden, step.logit_indices)
        arriving = self._arrivals.begin(tokens)

        def read() -> ForwardResult:
            result = ForwardResult(
                tokens=arriving(),
                scores=scores(),
                prompt_scores=prompt_scores,
                pass_results=pass_results,
                made=made,
                states=states_to_send(spans, computed.states, step=number) if computed.states else [],
                ties=computed.ties,
            )
            if masks is not None:
                result.failures.update({key: as_dalsegno_error(error) for key, error in failures.items()})
                _find_stuck(masks, result, lambda row: self._node.head(hidden, step.logit_indices[row, None]))
            return result

        # Followers get tokens from the host, so the step after this one has to wait for them.
        replayed = tokens if recorded is not None and self._followers is None else None
        return LaunchedStep(number=number, spans=spans, read=read, tokens=replayed)

    def _lap(self, name: str) -> None:
        if self._laps is not None:
            self._laps.lap(name)

    def _pool_states(self, spans: Items[Span], hidden: torch.Tensor) -> None:
        """Add the hidden states of pooled prompts to their poolers, each state once."""
        offset = 0
        for span in spans:
            spec, unreported = span.sequence.spec, span.unreported
            if spec.pooling is not None:
                pool = self.poolers.setdefault(spec.key, StatePooler(spec.pooling))
                first = offset + unreported.start - span.start
                pool.add(hidden[first : offset + span.count], unreported.start)
            offset += span.count


class _Arrivals:
    """Copies sampled tokens to the host, to two buffers in turn, because two steps may be under way."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._buffers = cycle([_HostBuffer(max_tokens), _HostBuffer(max_tokens)]) if is_cuda else None

    def begin(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Start the copy of (S,) int64 tokens; return a function that waits for them."""
        if self._buffers is None:
            found: list[int] = tokens.tolist()
            return lambda: found
        return next(self._buffers).begin(tokens)


class _HostBuffer:
    """Pinned memory for the tokens of a step."""

    def __init__(self, max_tokens: int) -> None:
        self._tokens = torch.empty(max_tokens, dtype=torch.int64, pin_memory=True)
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


def _finish(
    hidden: torch.Tensor,
    prompt_scores: list[TokenScore],
    pass_results: list[torch.Tensor],
    states: Callable[[], list[StateOutput]],
    ties: Items[int | None] = (),
) -> ForwardResult:
    """Wait for a step that samples nothing: its duration is measured."""
    if hidden.is_cuda:
        torch.cuda.current_stream(hidden.device).synchronize()
    return ForwardResult(
        tokens=[], prompt_scores=prompt_scores, pass_results=pass_results, states=states(), ties=ties
    )


def _raise(error: Exception) -> ForwardResult:
    raise error


@torch.inference_mode()
def _find_stuck(masks: StepMasks, result: ForwardResult, logits_of: Callable[[int], torch.Tensor]) -> None:
    """Set an error for guided sequences without an allowed token; NaN logits are reported elsewhere."""
    for row, key in zip(masks.rows, masks.keys, strict=True):
        if result.tokens[row] == NOT_A_TOKEN and logits_of(row).max().isfinite():
            result.failures[key] = ClientError(
                "bad_words, allowed_token_ids and the guide leave no token to choose: allow more tokens",
                code="nothing_left",
            )
