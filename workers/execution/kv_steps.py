"""A step's rows in the engine: begun, gone on with, handed over to the rank where they go on.

A firing of a KV node is a matter of the step's row for that node: outside of a loop it begins the row and is
complete with its first token; in a resident loop it is complete when the row's answer has ended, which stops
the loop. So the walks of a step share one row per node: `prefill` begins it, `decode` lets it go on to its
end. The engine runs through meanwhile; a walk is not told of every token.

Where the next walk over the node is on another rank, the row is begun for one token and says nothing here.
Its keys and values, the token, and what the model thought of it go to that rank with the firing; there the
row goes on from them as if it had begun there.

What a row is told beside the walk's inputs comes with the arguments of the walk that begins it: `sampling`,
`choice`, `stop`, `stop_token_ids`, `ignore_eos`, `guide` and `exhausts_guide`, `logprobs`, and `echo`, the
text of the prompt. A row that is not to be answered may be told `pooling`, how its prompt becomes an
embedding, or that its states are wanted as they are, or `warm`: its prompt is computed for others. What was
released of an embedding, or of states, stands: the last bits may depend on what is computed beside them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from models.base import Guiding, Processing
from models.sequence_request import PoolingParams, SequenceFacts, SequenceRequest
from shared.errors import BugError, Divergence
from shared.events import Guide, NodeReady, SequenceHandover, TokenLogprobs
from shared.tensors import Handle, inline_ids, read_ids
from shared.walks import Firing
from workers.data_plane.port import Array, TensorStore
from workers.data_plane.step_tensors import StepTensors, check, put
from workers.execution.node_result import NodeResult
from workers.execution.output_tracks import OutputTracks
from workers.execution.recovered_output import RecoveredTrack
from workers.execution.step_placement import PROMPT, StepPlacement
from workers.generation.engine_client import EngineClient
from workers.generation.generated_text import STOP, GeneratedText
from workers.generation.output_chunks import OutputStream
from workers.generation.pooled_output import array_chunks, released_array
from workers.generation.prompt_echo import ScoredEcho, echo_pieces
from workers.generation.sequence_handle import HandoverHandle, SequenceHandle
from workers.kv_engine.outputs import TokenScore
from workers.kv_engine.sequence_spec import KvExport, Pooling, PoolingMode, Sampling, SequenceSpec
from workers.orders.inbox import StepKey

if TYPE_CHECKING:
    from models.text.guides import CompiledGuide

TOKEN: Final = "token"  # noqa: S105 - an edge's name
"""A KV node's output: the token sampled last."""

OnItem = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A row from another rank."""

    state: SequenceHandover
    rank: int


class KvNodes:
    """The rows of one step.

    Args:
        recovered: the tracks as the log has them, also those that this rank does not write.
        on_item: by node: where its tokens stream on.
        read: told of tensors of another rank that were read: the rank, and their keys.

    Attributes:
        rows: by node.
        prompts: by node whose row begins elsewhere: what it begins with.
    """

    def __init__(
        self,
        *,
        key: StepKey,
        ready: NodeReady,
        placement: StepPlacement,
        processing: Processing,
        engine: EngineClient,
        store: TensorStore,
        tensors: StepTensors,
        tracks: OutputTracks,
        recovered: Mapping[str, RecoveredTrack],
        on_item: Callable[[str], OnItem | None],
        read: Callable[[int, Sequence[str]], None],
    ) -> None:
        self.sequences: dict[str, SequenceHandle] = {}
        self.prompts: dict[str, Handle] = {}
        self._key = key
        self._ready = ready
        self._placement = placement
        self._processing = processing
        self._engine = engine
        self._store = store
        self._tensors = tensors
        self._tracks = tracks
        self._recovered = recovered
        self._on_item = on_item
        self._read = read
        self._arrived: dict[str, _Arrived] = {}
        self._limits: dict[str, list[int]] = {}
        self._guides: dict[str, CompiledGuide] = {}
        self._requests: dict[str, SequenceRequest] = {}

    def receive_handover(self, node: str, rank: int, state: SequenceHandover) -> None:
        """Take over a row that `rank` began."""
        self._arrived[node] = _Arrived(state, rank)

    async def fire(self, place: int, firing: Firing, key: str) -> NodeResult:
        """Let a firing's row go as far as the firing; `key` is the prefix of the keys of its outputs.

        Raises:
            DalSegnoError: the engine, or the text, failed of it.
        """
        walk = self._placement.walks[place]
        node = walk.nodes[firing.node]
        loop = walk.loop_table[node.loop]
        is_resident = loop.index > 0 and loop.resident
        row = self.sequences.get(node.name)
        if row is None:
            row = await self._begin(place, firing, key)
        elif not is_resident or isinstance(row, HandoverHandle):
            raise BugError(
                f"walk {walk.name!r}: node {node.name!r} fires again outside of a resident loop; "
                "a chain begins a row once"
            )
        is_moving = isinstance(row, HandoverHandle)
        goes_on = not is_moving and not is_resident and self._loop_limits(node.name)
        await (row.began if goes_on else row.ended)
        facts: dict[str, Any] = {}
        if not goes_on and not is_moving:
            request, finish_reason = self._requests[node.name], row.generated.finish_reason
            assert finish_reason is not None, "an answer that has ended has a finish reason"
            ended = SequenceFacts(
                completion_tokens=row.generated.tokens,
                finish_reason=finish_reason,
                cached_tokens=row.cached_tokens if request.warm else msgspec.UNSET,
            )
            facts = msgspec.to_builtins(ended)
            if request.pooling is not None:
                self._put_out_vector(node.name, row)
        outputs: dict[str, Handle] = {}
        if TOKEN in node.outputs:
            assert row.last_token is not None, "a row that has begun has a token"
            outputs = {TOKEN: inline_ids(f"{key}/{TOKEN}", [row.last_token])}
        return NodeResult(
            outputs=outputs,
            facts=facts,
            stops=(loop.name,) if is_resident else (),
            handover=await self._state_of(row, key) if isinstance(row, HandoverHandle) else None,
            next_rank=self._placement.next_rank(place, node.name) if is_moving else None,
        )

    # ---- beginning ---------------------------------------------------------------------------------
    async def _begin(self, place: int, firing: Firing, key: str) -> SequenceHandle:
        """Begin a node's row, or go on with one that another rank has begun."""
        node = firing.node
        begins = self._placement.first_index(node)
        call = self._ready.walks[begins]
        prompt = firing.inputs.get(PROMPT) if place == begins else self.prompts.get(node)
        if prompt is None:
            raise BugError(
                f"walk {self._ready.walks[place].name!r}: node {node!r} has no row, and no input {PROMPT!r} "
                "to begin one"
            )
        prompt_ids = read_ids(await self._tensors.inline(prompt))
        request = self._requests[node] = SequenceRequest.of(call)
        if request.guide is not None:
            self._guides[node] = await self._compiled(request.guide)
        # Outside of a loop a node puts out one token, or none.
        at_least = 1 if TOKEN in self._placement.walks[begins].nodes[node].outputs else 0
        max_tokens = max(self._loop_limits(node), default=at_least)
        answer = GeneratedText.for_request(self._processing, request, max_tokens)
        if self._placement.is_handed_over(node) and self._placement.next_rank(place, node) not in (None, self._placement.rank):
            return self._begin_moving(node, request, prompt_ids, answer, max_tokens, key)
        return await self._begin_here(node, request, prompt_ids, answer, max_tokens, is_new=place == begins)

    async def _begin_here(
        self,
        node: str,
        request: SequenceRequest,
        prompt_ids: list[int],
        answer: GeneratedText,
        max_tokens: int,
        *,
        is_new: bool,
    ) -> SequenceHandle:
        arrived, recovered = self._arrived.pop(node, None), self._recovered_track(node)
        echo = self._echo(node, request, prompt_ids, answer)
        is_read = node in self._placement.tracks
        output = self._tracks.of(node) if is_read else None
        on_item = self._on_item(node)
        row = self.sequences[node] = SequenceHandle(self._name(node), answer, output, echo, on_item)
        if recovered.prefix_ids:
            recovered.replay(answer)
            row.resume(recovered.prefix_ids[-1])
            self._stream_again(recovered.prefix_ids, answer, on_item)
        elif request.pooling is not None and (known := released_array(recovered.released, len(prompt_ids))):
            row.vector = known
            row.end()
        elif max_tokens == 0 and echo is None and request.pooling is None and not request.warm:
            row.end()
        token_ids: list[int] = []
        if arrived is not None:
            token_ids = arrived.state.token_ids
            await self._take_over(row, arrived)
        elif not is_new and not row.ended.done():
            raise BugError(f"the row of node {node!r} was begun on another rank and did not come from there")
        if row.ended.done():
            return row
        spec = self._spec(node, request, prompt_ids, max_tokens, [*recovered.prefix_ids, *token_ids])
        if arrived is None:
            spec = replace(spec, scores_prompt=echo is not None)
        else:
            kv = await self._tensors.read(arrived.state.kv)
            spec = replace(spec, kv=kv, on_kv_read=self._on_kv_read(arrived))
        self._engine.submit(spec, row)
        if output is not None:
            self._hold_without_room(row.key, output)
        return row

    def _hold_without_room(self, key: str, output: OutputStream) -> None:
        """Let a row wait in the engine while the log does not take what it says."""
        rows = self._engine

        def on_room(has_room: bool) -> None:
            if has_room:
                rows.resume(key, by=output)
            else:
                rows.hold(key, by=output)

        output.on_room = on_room
        on_room(output.has_room)

    def _begin_moving(
        self,
        node: str,
        request: SequenceRequest,
        prompt_ids: list[int],
        answer: GeneratedText,
        max_tokens: int,
        key: str,
    ) -> SequenceHandle:
        """Begin a row for one token: the rest of it is another rank's."""
        recovered = self._recovered_track(node)
        row = self.sequences[node] = HandoverHandle(self._name(node), answer)
        if recovered.prefix_ids:
            recovered.replay(answer)
            row.resume(recovered.prefix_ids[-1])
        if row.ended.done():
            return row
        wants_scores = request.echo is not None and request.logprobs is not None
        generated = len(recovered.prefix_ids)
        spec = self._spec(node, request, prompt_ids, min(max_tokens, generated + 1), [*recovered.prefix_ids])
        export = KvExport(key=f"{key}/kv", scope=self._tensors.open_scope())
        scored = wants_scores and not generated and len(prompt_ids) > 1
        self._engine.submit(replace(spec, export=export, scores_prompt=scored), row)
        return row

    def _spec(
        self,
        node: str,
        request: SequenceRequest,
        prompt_ids: list[int],
        max_tokens: int,
        prefix_ids: list[int],
    ) -> SequenceSpec:
        return SequenceSpec(
            key=self._name(node),
            prompt_ids=prompt_ids,
            prefix_ids=prefix_ids,
            max_tokens=max_tokens,
            eos_ids=frozenset(self._processing.eos_ids),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=frozenset(request.stop_token_ids),
            sampling=_sampling(request, seed=self._ready.seed),
            guide=self._guides.get(node),
            exhausts_guide=request.exhausts_guide,
            logprobs=request.logprobs,
            pooling=_pooling(request.pooling),
            caches_prompt=request.warm,
            priority=self._ready.priority,
            deadline_ns=self._ready.deadline_ns,
            tenant=self._ready.tenant,
        )

    async def _compiled(self, guide: Guide) -> "CompiledGuide":
        """A guide, compiled beside the event loop where it is not known here yet."""
        if not isinstance(self._processing, Guiding):
            raise BugError("the plan hands on a guide, but the family's processing cannot compile any")
        return await asyncio.to_thread(self._processing.compiled, guide)

    def _echo(
        self, node: str, request: SequenceRequest, prompt_ids: list[int], answer: GeneratedText
    ) -> ScoredEcho | None:
        """Put out the prompt where that is wanted; what of it has to wait for its scores."""
        if request.echo is None:
            return None
        top = request.logprobs
        waiting = [
            piece
            for piece in echo_pieces(prompt_ids, request.echo, top)
            if not self._tracks.was_released(node, piece.content)
        ]
        if waiting and self._recovered_track(node).prefix_ids:
            raise Divergence(
                "an answer was begun by an earlier attempt, but not all of its echo was released"
            )
        output = self._tracks.of(node)
        if top is None:
            for piece in waiting:
                output.add_content(piece.content)
            return None
        echo = ScoredEcho(waiting, answer.bytes_of)
        for content in echo.begin(prompt_ids[0]):
            output.add_content(content)
        return None if echo.complete else echo

    def _put_out_vector(self, node: str, row: SequenceHandle) -> None:
        """Put out an embedding, or states, as far as no earlier attempt did."""
        assert row.vector is not None, "a row that was pooled has its vector"
        for content in array_chunks(row.vector, self._recovered_track(node).released):
            self._tracks.release(node, content)

    # ---- from rank to rank -------------------------------------------------------------------------
    async def _state_of(self, row: HandoverHandle, key: str) -> SequenceHandover | None:
        """A row as it goes to another rank; None where an earlier attempt had ended it."""
        if row.kv is None:
            return None
        self._tensors.lend(row.kv)
        scores: Handle | None = None
        if row.prompt_scores:
            array = scores_array(row.prompt_scores)
            scores = await put(self._store, f"{key}/prompt_scores", array, self._tensors.open_scope())
            self._tensors.lend(scores)
        return SequenceHandover(
            kv=row.kv, token_ids=row.token_ids, logprobs=row.logprobs, prompt_scores=scores
        )

    async def _take_over(self, row: SequenceHandle, arrived: _Arrived) -> None:
        """Fold what another rank generated, and put it out."""
        state = arrived.state
        if state.prompt_scores is not None and row.echo is not None:
            row.push_prompt_scores(scores_of(await self._tensors.read(state.prompt_scores)))
            self._tensors.check([state.prompt_scores])
        told: Sequence[TokenLogprobs | None] = state.logprobs or [None] * len(state.token_ids)
        for token_id, logprobs in zip(state.token_ids, told, strict=True):
            row.push(token_id, logprobs)
        unread = [handle for handle in (state.prompt_scores,) if handle is not None]
        if row.ended.done():
            unread.append(state.kv)  # nothing is to be computed from it
        if keys := [handle.key for handle in unread if handle.data is None]:
            self._read(arrived.rank, keys)

    def _on_kv_read(self, arrived: _Arrived) -> Callable[[], None]:
        """What the engine's thread calls when it has copied keys and values."""
        loop, store, kv = asyncio.get_running_loop(), self._store, arrived.state.kv

        def on_kv_read() -> None:
            check(store, kv)
            loop.call_soon_threadsafe(self._read, arrived.rank, [kv.key])

        return on_kv_read

    # ---- within ------------------------------------------------------------------------------------
    @staticmethod
    def _stream_again(prefix_ids: Sequence[int], answer: GeneratedText, on_item: OnItem | None) -> None:
        """Tokens of earlier attempts were released, but streams begin anew."""
        if on_item is None:
            return
        ended = answer.finish_reason == STOP
        for place, token_id in enumerate(prefix_ids[: len(prefix_ids) - ended]):
            on_item(token_id, place)

    def _name(self, node: str) -> str:
        return f"{self._key}.{node}"

    def _recovered_track(self, node: str) -> RecoveredTrack:
        """What earlier attempts put out for a node that is heard."""
        if not self._placement.emits_output(node):
            return _NOTHING
        return self._recovered.get(self._placement.track_of(node)) or _NOTHING

    def _loop_limits(self, node: str) -> list[int]:
        """The most iterations of each resident loop over `node` in this chain."""
        known = self._limits.get(node)
        if known is not None:
            return known
        limits = self._limits[node] = list[int]()
        for call, walk in zip(self._ready.walks, self._placement.walks, strict=True):
            found = walk.nodes.get(node)
            if found is not None and found.loop > 0 and walk.loop_table[found.loop].resident:
                limits.append(walk.max_iters(call.args)[found.loop])
        return limits


_NOTHING: Final = RecoveredTrack()


def _sampling(request: SequenceRequest, *, seed: int) -> Sampling:
    given = msgspec.to_builtins(request.sampling) if request.sampling is not None else {}
    return Sampling(**given, seed=seed, sample_index=request.choice)


def _pooling(params: PoolingParams | None) -> Pooling | None:
    if params is None:
        return None
    return Pooling(
        mode=PoolingMode(params.mode), normalize=bool(params.normalize), dimensions=params.dimensions
    )


def scores_array(scores: Sequence[TokenScore]) -> Array:
    """Scores as a tensor: int32 (tokens, 1 + top, 2), each an id and the bits of a float32."""
    rows = [[(score.token_id, score.logprob), *score.top] for score in scores]
    cells = np.empty((len(rows), len(rows[0]), 2), dtype="<i4")
    cells[:, :, 0] = [[token_id for token_id, _ in row] for row in rows]
    floats = np.array([[logprob for _, logprob in row] for row in rows], dtype="<f4")
    cells[:, :, 1] = floats.view("<i4")
    return Array(dtype="int32", shape=cells.shape, data=cells.reshape(-1).view(np.uint8))


def scores_of(array: Array) -> list[TokenScore]:
    """The scores in such a tensor."""
    cells = array.data.view("<i4").reshape(array.shape)
    ids: list[list[int]] = cells[:, :, 0].tolist()
    floats: list[list[float]] = np.ascontiguousarray(cells[:, :, 1]).view("<f4").tolist()
    return [
        TokenScore(token_id=names[0], logprob=values[0], top=tuple(zip(names[1:], values[1:], strict=True)))
        for names, values in zip(ids, floats, strict=True)
    ]
