"""KV nodes of one step: their calls start, continue and hand over sequences in the KV engine.

The walks of a step share one sequence per KV node. Outside of a loop, a node call starts the sequence and
completes with its first token. In a resident loop, a call completes when the sequence has ended, and stops
the loop. So `prefill` starts a sequence and `decode` continues it to its end, while the engine runs without
interruption: tokens do not pass through the walk.

If the node's next walk runs on another rank, the sequence generates one token here and emits nothing. Its
keys and values, the token and its scores go to that rank (`workers.execution.sequence_handover`), which
continues the sequence as if it had started there.

The arguments of the walk that starts a sequence are a `models.sequence_request.SequenceRequest`. Released
parts of an embedding, or of hidden states, stay as they are: the last bits of a computation may depend on the
other sequences in its batches.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from models.base import TOKEN, Processing
from models.sequence_request import PoolingParams, SamplingParams, SequenceFacts, SequenceRequest
from models.text.reasoning import BEGINS_INSIDE
from shared.errors import BugError, Divergence, WorkerError
from shared.events import NodeReady, SequenceHandover
from shared.tensors import Handle, inline_ids, read_ids
from shared.walks import CompiledNode, Firing
from workers.data_plane.port import Array, DeviceArray, TensorStore
from workers.data_plane.step_tensors import StepTensors, Value, as_array
from workers.execution.node_result import NodeResult
from workers.execution.node_works import NodeWorks
from workers.execution.output_tracks import OutputTracks
from workers.execution.recovered_output import RecoveredTrack
from workers.execution.sequence_handover import ArrivedSequence, ReportRead, SequenceHandovers
from workers.execution.step_placement import PROMPT, StepPlacement
from workers.execution.stream_feed import StreamFeed
from workers.generation.engine_client import EngineClient
from workers.generation.generated_text import STOP, GeneratedText
from workers.generation.output_chunks import OutputStream
from workers.generation.prompt_echo import ScoredEcho, echo_pieces
from workers.generation.prompt_output import array_chunks, fully_released_array
from workers.generation.sequence_handle import (
    HandoverHandle,
    OnItem,
    OnTensors,
    SequenceHandle,
    StatesHandle,
)
from workers.guides.guide_queue import GuideQueue
from workers.kv_engine.sequence_spec import Feed, KvExport, Pooling, PoolingMode, Sampling, SequenceSpec
from workers.orders.inbox import StepKey
from workers.streams.attempt_streams import AttemptStreams
from workers.threads.engine_work import EngineWork

if TYPE_CHECKING:
    from models.text.guides import CompiledGuide

EMBEDS: Final = "embeds"
"""The input of a KV node with the rows of its prompt's media, (N, width)."""
_EMPTY: Final = RecoveredTrack()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The input of a new sequence.

    Attributes:
        max_tokens: the limit of generated tokens, including those of earlier attempts.
        embeds: the rows of the prompt's media; None if it has none, or the sequence comes from another rank.
    """

    node: str
    request: SequenceRequest
    prompt_ids: list[int]
    generated: GeneratedText
    max_tokens: int
    embeds: Array | DeviceArray | None


class KvNodes:
    """The KV nodes of one step, and their sequences.

    Args:
        recovered: by name, the output tracks at the start of the step, including those of other ranks.
        on_item: returns, for a node, the function that takes its streamed tokens; `on_tensors`, the one that
            takes what is streamed besides.
        streams: the streams of the attempt; None where the model has none.
        read: reports that tensors of another rank were read.
        works: the records of the sequences' work.

    Attributes:
        sequences: by node, the sequences of this rank.
        prompts: by node, the prompts of sequences that start on another rank.
    """

    def __init__(
        self,
        *,
        key: StepKey,
        ready: NodeReady,
        placement: StepPlacement,
        processing: Processing,
        guides: GuideQueue,
        engine: EngineClient,
        store: TensorStore,
        tensors: StepTensors,
        tracks: OutputTracks,
        recovered: Mapping[str, RecoveredTrack],
        on_item: Callable[[str], OnItem | None],
        on_tensors: Callable[[str], OnTensors | None],
        streams: AttemptStreams | None,
        read: ReportRead,
        works: NodeWorks,
    ) -> None:
        self.sequences: dict[str, SequenceHandle] = {}
        self.prompts: dict[str, Handle] = {}
        self._key = key
        self._ready = ready
        self._placement = placement
        self._processing = processing
        self._guide_queue = guides
        self._engine = engine
        self._tensors = tensors
        self._tracks = tracks
        self._recovered = recovered
        self._on_item = on_item
        self._on_tensors = on_tensors
        self._streams = streams
        self._works = works
        self._feeds: dict[str, StreamFeed] = {}
        self._sent_again: dict[str, StatesHandle] = {}
        self._handovers = SequenceHandovers(store, tensors, read)
        self._arrived: dict[str, ArrivedSequence] = {}
        self._limits: dict[str, list[int]] = {}
        self._guides: dict[str, CompiledGuide] = {}
        self._requests: dict[str, SequenceRequest] = {}

    def receive_handover(self, node: str, rank: int, state: SequenceHandover) -> None:
        """Take over a sequence that `rank` has started."""
        self._arrived[node] = ArrivedSequence(state, rank)

    async def fire(self, walk_index: int, firing: Firing, key: str) -> NodeResult:
        """Call a KV node: wait for its sequence's first token, or for its end.

        `walk_index` is the index of the walk in the step, `key` the key prefix of the outputs.

        Raises:
            DalSegnoError: the engine or the text failed.
        """
        walk = self._placement.walks[walk_index]
        node = walk.nodes[firing.node]
        loop = walk.loop_table[node.loop]
        is_resident = loop.index > 0 and loop.resident
        sequence = self.sequences.get(node.name)
        if node.streams:
            self._begin_feed(node, firing)
        if sequence is None:
            sequence = await self._start(walk_index, firing, key)
        elif not is_resident or isinstance(sequence, HandoverHandle):
            raise BugError(
                f"walk {walk.name!r}: node {node.name!r} fires again outside of a resident loop; expected a "
                "step to start a sequence once"
            )
        is_handover = isinstance(sequence, HandoverHandle)
        continues = not is_handover and not is_resident and self._loop_limits(node.name)
        await self._wait(node.name, sequence, sequence.began if continues else sequence.ended)
        if not continues and sequence.rest and sequence.output is not None:
            await sequence.output.wait_stored()  # contents would overtake the tokens before it
            self._tracks.release(node.name, {"text": sequence.rest})
        facts = {} if continues or is_handover else self._finish(node.name, sequence)
        outputs: dict[str, Handle] = {}
        if TOKEN in node.outputs:
            # The engine runs ahead: by now `last_token` may be a later one than the sequence began with.
            token = sequence.began.result() if continues else sequence.last_token
            assert token is not None, "a sequence that has started has a token"
            outputs = {TOKEN: inline_ids(f"{key}/{TOKEN}", [token])}
        return NodeResult(
            outputs=outputs,
            facts=facts,
            stops=(loop.name,) if is_resident else (),
            handover=(
                await self._handovers.export(sequence, key) if isinstance(sequence, HandoverHandle) else None
            ),
            next_rank=self._placement.next_rank(walk_index, node.name) if is_handover else None,
        )

    def _begin_feed(self, node: CompiledNode, firing: Firing) -> None:
        """Note the stream that a node's sequence takes, and its first chunk."""
        assert self._streams is not None, "a model with streams has them"
        [name] = node.streams
        self._feeds[node.name] = StreamFeed(self._streams, (name, node.name), firing.inputs[name])

    async def _wait(self, node: str, sequence: SequenceHandle, until: "asyncio.Future[Any]") -> None:
        """Wait for a sequence, and feed it where it takes a stream."""
        if node in self._feeds:
            await self._feeds[node].run(sequence, self._engine, until)
        await until
        if until is sequence.ended and node in self._sent_again:
            await self._sent_again[node].ended

    def _finish(self, node: str, sequence: SequenceHandle) -> dict[str, Any]:
        """Emit the vectors of a pooled prompt; return the facts of an ended sequence."""
        request, finish_reason = self._requests[node], sequence.generated.finish_reason
        assert finish_reason is not None, "a sequence that has ended has a finish reason"
        if request.pooling is not None:
            assert sequence.vector is not None, "a pooled sequence has its vectors"
            for content in array_chunks(sequence.vector, self._recovered_track(node).released):
                self._tracks.release(node, content)
        facts = SequenceFacts(
            completion_tokens=sequence.generated.tokens,
            finish_reason=finish_reason,
            stop_reason=msgspec.UNSET if (stop := sequence.generated.stop_reason) is None else stop,
            cached_tokens=sequence.cached_tokens if request.warm else msgspec.UNSET,
            counts=dict(sequence.counts),
            token_ids=sequence.generated.ids or [],
            reasoning_tokens=sequence.generated.reasoning_tokens,
        )
        found: dict[str, Any] = msgspec.to_builtins(facts)
        return found

    # ---- start of a sequence -----------------------------------------------------------------------
    async def _start(self, walk_index: int, firing: Firing, key: str) -> SequenceHandle:
        """Start a node's sequence, or continue one that another rank has started."""
        node = firing.node
        first = self._placement.first_index(node)
        prompt = firing.inputs.get(PROMPT) if walk_index == first else self.prompts.get(node)
        if prompt is None:
            raise BugError(
                f"walk {self._ready.walks[walk_index].name!r}: expected an input {PROMPT!r} to start a "
                f"sequence on node {node!r}, found none"
            )
        prompt_ids = read_ids(await self._tensors.inline(prompt))
        request = self._requests[node] = SequenceRequest.of(self._ready.walks[first])
        if request.guide is not None:
            self._guides[node] = await self._guide_queue.compiled(request.guide, self._ready.tenant)
        # Outside of a loop a node emits one token or none.
        at_least = 1 if TOKEN in self._placement.walks[first].nodes[node].outputs else 0
        max_tokens = max(self._loop_limits(node), default=at_least)
        start = _Start(
            node=node,
            request=request,
            prompt_ids=prompt_ids,
            generated=GeneratedText.for_request(
                self._processing, request, max_tokens, is_read=self._placement.emits_output(node)
            ),
            max_tokens=max_tokens,
            embeds=await self._rows_of(firing.inputs.get(EMBEDS)) if request.parts else None,
        )
        if self._placement.is_handed_over(node):
            next_rank = self._placement.next_rank(walk_index, node)
            if next_rank not in (None, self._placement.rank):
                if request.token_program:
                    raise WorkerError(
                        f"node {node!r} generates several tokens at a time (program "
                        f"{request.token_program!r}), so it cannot prefill and decode on different ranks: "
                        "place its walks on one rank",
                        code="token_program_handed_over",
                    )
                return self._start_handover(start, key)
        return await self._start_here(start, is_first=walk_index == first)

    async def _rows_of(self, value: Value | None) -> Array | DeviceArray | None:
        """The rows of the prompt's media for the engine, in memory that stays.

        Raises:
            LostTensor: the tensor is gone.
        """
        if value is None or isinstance(value, Array):
            return value
        found = await self._tensors.for_engine(value)
        return found if isinstance(found, DeviceArray) else as_array(await self._tensors.inline(value))

    async def _start_here(self, start: _Start, *, is_first: bool) -> SequenceHandle:
        """Start a sequence that ends on this rank."""
        node, request, generated = start.node, start.request, start.generated
        arrived, recovered = self._arrived.pop(node, None), self._recovered_track(node)
        echo = self._emit_echo(start)
        output = self._tracks.of(node) if node in self._placement.tracks else None
        if output is not None and request.reasoning is not None and request.reasoning.is_inside:
            output.describe({BEGINS_INSIDE: True})
        on_item, on_tensors = self._on_item(node), self._on_tensors(node)
        work = self._works.record(node)
        sequence = SequenceHandle(self._name(node), generated, output, echo, on_item, on_tensors, work)
        self.sequences[node] = sequence
        if recovered.prefix_ids:
            recovered.replay(generated)
            sequence.resume(recovered.prefix_ids)
            _stream_again(recovered.prefix_ids, generated, on_item)
        elif request.pooling is not None and (
            vector := fully_released_array(recovered.released, len(start.prompt_ids))
        ):
            sequence.vector = vector
            sequence.end()
        elif start.max_tokens == 0 and echo is None and request.pooling is None and not request.warm:
            sequence.end()
        token_ids: list[int] = []
        if arrived is not None:
            token_ids = arrived.state.token_ids
            await self._handovers.take_over(sequence, arrived)
        elif not is_first and not sequence.ended.done():
            raise BugError(
                f"node {node!r}: expected its sequence, which another rank has started, to arrive from there"
            )
        if sequence.ended.done():
            if on_tensors is not None and recovered.prefix_ids:
                self._send_again(start, recovered.prefix_ids, on_tensors)
            return sequence
        spec = self._spec(start, start.max_tokens, [*recovered.prefix_ids, *token_ids], work)
        if node in self._feeds:
            feed = self._feeds[node]
            items = await feed.prompt_items(request.prompt_items)
            assert spec.feed is not None
            spec = replace(spec, feed=replace(spec.feed, items=items, ended=feed.ended))
        if arrived is None:
            spec = replace(spec, scores_prompt=echo is not None)
        else:
            kv = await self._tensors.for_engine(arrived.state.kv)
            spec = replace(spec, kv=kv, on_kv_read=self._handovers.on_kv_read(arrived))
        self._engine.submit(spec, sequence)
        if output is not None:
            self._hold_without_room(sequence.key, output)
        return sequence

    def _send_again(self, start: _Start, prefix_ids: Sequence[int], on_tensors: OnTensors) -> None:
        """Compute the tensors of a text that earlier attempts released whole: its streams start again."""
        prompt_ids = [*start.prompt_ids, *prefix_ids[:-1]]
        spec = self._spec(start, 0, [], self._works.record(start.node))
        spec = replace(spec, prompt_ids=prompt_ids, guide=None)
        handle = self._sent_again[start.node] = StatesHandle(spec.key, on_tensors)
        self._engine.submit(spec, handle)

    def _start_handover(self, start: _Start, key: str) -> SequenceHandle:
        """Start a sequence for one token; another rank continues it."""
        node, request, recovered = start.node, start.request, self._recovered_track(start.node)
        work = self._works.record(node)
        sequence = self.sequences[node] = HandoverHandle(self._name(node), start.generated, work)
        if recovered.prefix_ids:
            recovered.replay(start.generated)
            sequence.resume(recovered.prefix_ids)
        if sequence.ended.done():
            return sequence
        wants_scores = request.echo is not None and request.echo_logprobs is not None
        tokens = len(recovered.prefix_ids)
        spec = self._spec(start, min(start.max_tokens, tokens + 1), [*recovered.prefix_ids], work)
        publish = self._tensors.publisher(f"{key}/kv", self._placement.peer_ranks)
        export = KvExport(key=f"{key}/kv", scope=self._tensors.open_scope(), publish=publish)
        scores_prompt = wants_scores and not tokens and len(start.prompt_ids) > 1
        self._engine.submit(replace(spec, export=export, scores_prompt=scores_prompt), sequence)
        return sequence

    def _hold_without_room(self, key: str, output: OutputStream) -> None:
        """Hold a sequence in the engine while the log does not accept its output."""
        engine = self._engine

        def on_room(has_room: bool) -> None:
            if has_room:
                engine.resume(key, by=output)
            else:
                engine.hold(key, by=output)

        output.on_room = on_room
        on_room(output.has_room)

    def _spec(self, start: _Start, max_tokens: int, prefix_ids: list[int], work: EngineWork) -> SequenceSpec:
        request = start.request
        return SequenceSpec(
            key=self._name(start.node),
            node=start.node,
            prompt_ids=start.prompt_ids,
            prefix_ids=prefix_ids,
            max_tokens=max_tokens,
            eos_ids=frozenset(self._processing.eos_ids),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=frozenset(request.stop_token_ids),
            sampling=_sampling(request.sampling, request, seed=self._ready.seed),
            guide=self._guides.get(start.node),
            exhausts_guide=request.exhausts_guide,
            logprobs=request.logprobs,
            pooling=_pooling(request.pooling),
            caches_prompt=request.warm,
            priority=self._ready.priority,
            deadline_ns=self._ready.deadline_ns,
            tenant=self._ready.tenant,
            cache_root=self._ready.cache_salt,
            adapter=self._ready.adapter,
            parts=request.parts,
            embeds=start.embeds,
            sends=frozenset(name for name, _ in self._placement.tensor_streams(start.node)),
            feed=Feed(
                ended=self._placement.stream_taken(start.node) is None,
                args=self._ready.walks[self._placement.first_index(start.node)].args,
                sampling=_sampling(request.inner_sampling, request, seed=self._ready.seed),
                penalized_ids=request.penalized_ids,
            ),
            token_program=request.token_program,
            options=request.options,
            work=work,
        )

    def _emit_echo(self, start: _Start) -> ScoredEcho | None:
        """Emit the prompt where requested; return the part that waits for scores."""
        node, request = start.node, start.request
        if request.echo is None:
            return None
        waiting = [
            piece
            for piece in echo_pieces(start.prompt_ids, request.echo, request.echo_logprobs)
            if not self._tracks.consume_released(node, piece.content)
        ]
        if waiting and self._recovered_track(node).prefix_ids:
            raise Divergence(
                "expected an earlier attempt to release the whole echo before its first token, found that "
                f"{len(waiting)} pieces of it are missing"
            )
        output = self._tracks.of(node)
        if request.echo_logprobs is None:
            for piece in waiting:
                output.add_content(piece.content)
            return None
        echo = ScoredEcho(waiting, start.generated.bytes_of)
        for content in echo.begin(start.prompt_ids[0]):
            output.add_content(content)
        return None if echo.complete else echo

    # ---- internals ---------------------------------------------------------------------------------
    def _name(self, node: str) -> str:
        return f"{self._key}.{node}"

    def _recovered_track(self, node: str) -> RecoveredTrack:
        """The recovered track of an output node; an empty one for any other node."""
        if not self._placement.emits_output(node):
            return _EMPTY
        return self._recovered.get(self._placement.track_of(node)) or _EMPTY

    def _loop_limits(self, node: str) -> list[int]:
        """The iteration limit of each resident loop over `node` in this step."""
        known = self._limits.get(node)
        if known is not None:
            return known
        limits = self._limits[node] = list[int]()
        for call, walk in zip(self._ready.walks, self._placement.walks, strict=True):
            found = walk.nodes.get(node)
            if found is not None and found.loop > 0 and walk.loop_table[found.loop].resident:
                limits.append(walk.max_iters(call.args)[found.loop])
        return limits


def _stream_again(prefix_ids: Sequence[int], generated: GeneratedText, on_item: OnItem | None) -> None:
    """Send the tokens of earlier attempts again to streams, which restart in each attempt."""
    if on_item is None:
        return
    ended = generated.finish_reason == STOP
    for index, token_id in enumerate(prefix_ids[: len(prefix_ids) - ended]):
        on_item(token_id, index)


def _sampling(params: SamplingParams | None, request: SequenceRequest, *, seed: int) -> Sampling:
    given = params or SamplingParams()
    return Sampling(
        temperature=given.temperature or 0.0,
        top_p=1.0 if given.top_p is None else given.top_p,
        top_k=given.top_k or 0,
        min_p=given.min_p or 0.0,
        seed=seed,
        sample_index=request.choice,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        presence_penalty=given.presence_penalty or 0.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        logit_bias=given.logit_bias,
        bad_words=given.bad_words,
        allowed_token_ids=given.allowed_token_ids,
        min_tokens=given.min_tokens or 0,
        length_decay=given.length_decay,
    )


def _pooling(params: PoolingParams | None) -> Pooling | None:
    if params is None:
        return None
    return Pooling(
        mode=PoolingMode(params.mode), normalize=bool(params.normalize), dimensions=params.dimensions
    )
