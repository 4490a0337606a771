"""One chain of walks, run: the dataflow of each walk, over CPU nodes and rows of the engine.

A firing of a CPU node is a call in a thread. A firing of a KV node is a matter of the chain's row for that
node: outside of a loop it begins the row and is complete with its first token; in a resident loop it is
complete when the row's answer has ended, which stops the loop.

What a KV node's row is told beside the walk's inputs comes with the arguments of the walk that begins it:
`sampling`, `choice`, `stop`, `stop_token_ids`, `ignore_eos`, `logprobs`, and `echo`, the text of the prompt.

Knows neither the log nor other orders: chunks go where it is told to put them.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor as Pool
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from shared.errors import BugError, Divergence, TensorGone
from shared.events import NodeReady, OutputChunk, OutputTotals, WalkCall, WalkResult
from shared.models.base import EngineKind, ModelGraph, Processing
from shared.tensors import Handle, inline_ids, read_ids
from shared.tracing import NOTHING, Span
from shared.walks import Client, CompiledWalk, Emission, Firing, WalkRun
from workers.answer import Answer
from workers.echo import ScoredEcho, pieces
from workers.engine.sequence import Sampling, SequenceSpec
from workers.inbox import StepKey
from workers.output import Chunker, OutputState, OutputStream
from workers.recall import Recalled
from workers.rows import Row, Rows

PROMPT: Final = "token_ids"
"""The input a KV node's row begins with."""
TOKEN: Final = "token"  # noqa: S105 - an edge's name
"""A KV node's output: the token sampled last."""

_TRACED: Final = ("prompt_tokens", "completion_tokens", "finish_reason")
"""What of a walk's facts its span tells: nothing that a client wrote."""

PostChunk = Callable[[OutputChunk, Callable[[int], None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """What this rank runs, loaded."""

    graph: ModelGraph
    processing: Processing
    rows: Rows
    pool: Pool


class Chain:
    """One order's walks, one after the other.

    Attributes:
        rows: its rows in the engine, by node.
        state: where the request's output stands.
    """

    def __init__(
        self, hosted: Hosted, key: StepKey, ready: NodeReady, recalled: Recalled, post: PostChunk
    ) -> None:
        self.rows: dict[str, Row] = {}
        self.state: OutputState = recalled.state
        self._hosted = hosted
        self._key = key
        self._ready = ready
        self._recalled = recalled
        self._released = list(recalled.released)
        self._output = OutputStream(
            Chunker(recalled.state, request_id=key.request_id, attempt=key.attempt, choice=_choice_of(ready)),
            post,
        )
        self._values: dict[str, Any] = {}  # what walks put out, for those behind them

    async def run(self, span: Span = NOTHING) -> tuple[list[WalkResult], dict[str, float]]:
        """Run all walks; what each came to, and how long it took. Each is a child of `span`."""
        clock = asyncio.get_running_loop().time
        results: list[WalkResult] = []
        durations_s: dict[str, float] = {}
        for call in self._ready.walks:
            begun_s = clock()
            with span.child(f"walk {call.name}") as part:
                result = await self._walk(call)
                part.set({f"dalsegno.{name}": result.facts[name] for name in _TRACED if name in result.facts})
            results.append(result)
            durations_s[call.name] = durations_s.get(call.name, 0.0) + clock() - begun_s
        return results, durations_s

    async def stored(self) -> OutputTotals:
        """Wait until all that was put out is stored; what the output then amounts to."""
        if self._released:
            raise Divergence(
                f"{len(self._released)} chunks were released by an earlier attempt and did not come out again"
            )
        return await self._output.stored()

    def close(self) -> None:
        """Put nothing out any more."""
        self._output.close()

    # ---- walks -------------------------------------------------------------------------------------
    async def _walk(self, call: WalkCall) -> WalkResult:
        walk = self._compiled(call.name)
        run = WalkRun(walk, call.args)
        facts: dict[str, Any] = {}
        run.start(self._inputs(walk, call))
        try:
            async with asyncio.TaskGroup() as firings:
                self._fire_ready(run, call, facts, firings)
        except ExceptionGroup as group:
            raise _first(group) from None
        if not run.done:
            raise BugError(f"walk {call.name!r} came to a halt before its end")
        return WalkResult(name=call.name, facts=facts, outputs=_kept(run))

    def _compiled(self, name: str) -> CompiledWalk:
        walks = self._hosted.graph.walks
        if name not in walks:
            raise BugError(f"{self._hosted.graph.family} has no walk {name!r}; it has {sorted(walks)}")
        return walks[name]

    def _inputs(self, walk: CompiledWalk, call: WalkCall) -> dict[str, Any]:
        carried = {name: self._values[name] for name in walk.takers if name in self._values}
        return carried | call.inputs

    def _fire_ready(
        self, run: WalkRun, call: WalkCall, facts: dict[str, Any], firings: asyncio.TaskGroup
    ) -> None:
        for firing in run.take_ready():
            firings.create_task(self._fire(run, call, facts, firing, firings))

    async def _fire(
        self,
        run: WalkRun,
        call: WalkCall,
        facts: dict[str, Any],
        firing: Firing,
        firings: asyncio.TaskGroup,
    ) -> None:
        kind = self._hosted.graph.nodes[firing.node]
        match kind:
            case EngineKind.CPU:
                outputs = await self._on_cpu(call, facts, firing)
            case EngineKind.KV:
                outputs = await self._on_row(run, call, facts, firing)
            case EngineKind.STATELESS:
                raise BugError(f"node {firing.node!r} needs the stateless engine, which is not there yet")
        emissions = run.complete(firing, outputs)
        assert emissions is not None, "a firing under way is completed once"
        self._emit(kind, emissions)
        self._fire_ready(run, call, facts, firings)

    def _emit(self, kind: EngineKind, emissions: list[Emission]) -> None:
        for emission in emissions:
            self._values[emission.edge] = emission.value
            # A row's tokens are put out as they come, not when its walk is told.
            if isinstance(emission.to, Client) and kind is not EngineKind.KV:
                values = emission.value if isinstance(emission.value, list) else [emission.value]
                for value in values:
                    self._release(_content(emission.to.modality, value))

    def _release(self, content: Mapping[str, Any]) -> None:
        """Put out a chunk, unless an earlier attempt did."""
        if not self._was_released(content):
            self._output.add_content(content)

    def _was_released(self, content: Mapping[str, Any]) -> bool:
        """Whether an earlier attempt put such a chunk out; each counts for one."""
        for released in self._released:
            if all(getattr(released, name) == value for name, value in content.items()):
                self._released.remove(released)
                return True
        return False

    # ---- CPU nodes ---------------------------------------------------------------------------------
    async def _on_cpu(self, call: WalkCall, facts: dict[str, Any], firing: Firing) -> Mapping[str, Handle]:
        loop = asyncio.get_running_loop()
        work = partial(
            self._hosted.processing.run, firing.node, self._key_of(call, firing), firing.inputs, call.args
        )
        result = await loop.run_in_executor(self._hosted.pool, work)
        facts.update(result.facts)
        return result.outputs

    def _key_of(self, call: WalkCall, firing: Firing) -> str:
        """The prefix of the keys of what a firing puts out: request / attempt / step / walk / node."""
        request_id, attempt, step = self._key
        return "/".join(map(str, (request_id, attempt, step, call.name, firing.node, *firing.path)))

    # ---- KV nodes ----------------------------------------------------------------------------------
    async def _on_row(
        self, run: WalkRun, call: WalkCall, facts: dict[str, Any], firing: Firing
    ) -> dict[str, Handle]:
        loop = run.walk.loop_table[run.walk.nodes[firing.node].loop]
        is_resident = loop.index > 0 and loop.resident
        row = self.rows.get(firing.node)
        if row is None:
            row = self._begin_row(call, firing)
        elif not is_resident:
            raise BugError(
                f"walk {call.name!r}: node {firing.node!r} fires again outside of a resident loop; "
                "a chain begins a row once"
            )
        goes_on = not is_resident and self._loop_limits(firing.node)
        await (row.began if goes_on else row.ended)
        if not goes_on:
            facts |= {"completion_tokens": row.answer.tokens, "finish_reason": row.answer.finish_reason}
        if is_resident:
            run.stop(loop.name)
        if TOKEN not in run.walk.nodes[firing.node].outputs:
            return {}
        assert row.last_token is not None, "a row that has begun has a token"
        return {TOKEN: inline_ids(f"{self._key_of(call, firing)}/{TOKEN}", [row.last_token])}

    def _begin_row(self, call: WalkCall, firing: Firing) -> Row:
        if PROMPT not in firing.inputs:
            raise BugError(
                f"walk {call.name!r}: node {firing.node!r} has no row, and no input {PROMPT!r} to begin one"
            )
        node, args, prompt_ids = firing.node, call.args, read_ids(firing.inputs[PROMPT])
        eos_ids, ignore_eos = frozenset(self._hosted.processing.eos_ids), bool(args.get("ignore_eos", False))
        stop_token_ids = frozenset(args.get("stop_token_ids", ()))
        # Outside of a loop a node puts out one token, or none.
        at_least = 1 if TOKEN in self._compiled(call.name).nodes[node].outputs else 0
        max_tokens = max(self._loop_limits(node), default=at_least)
        answer = Answer(
            self._hosted.processing.text_decoder(),
            max_tokens=max_tokens,
            eos_ids=eos_ids,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            stop=args.get("stop", ()),
        )
        echo = self._echo(args, prompt_ids, answer)
        spec = SequenceSpec(
            key=f"{self._key}.{node}",
            prompt_ids=prompt_ids,
            prefix_ids=list(self._recalled.prefix_ids) if self._speaks(node) else [],
            max_tokens=max_tokens,
            eos_ids=eos_ids,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            sampling=Sampling(
                **args.get("sampling", {}), seed=self._ready.seed, sample_index=args.get("choice", 0)
            ),
            logprobs=args.get("logprobs"),
            scores_prompt=echo is not None,
        )
        is_read = self._speaks(node) or echo is not None
        row = self.rows[node] = Row(spec.key, answer, self._output if is_read else None, echo)
        if spec.prefix_ids:
            self._recalled.replay(answer)
            row.resume(spec.prefix_ids[-1])
        elif max_tokens == 0 and echo is None:
            row.end()
        if not row.ended.done():
            self._hosted.rows.submit(spec, row)
        return row

    def _echo(self, args: Mapping[str, Any], prompt_ids: list[int], answer: Answer) -> ScoredEcho | None:
        """Put out the prompt where that is wanted; what of it has to wait for its scores."""
        if "echo" not in args:
            return None
        top = args.get("logprobs")
        waiting = [
            piece for piece in pieces(prompt_ids, args["echo"], top) if not self._was_released(piece.content)
        ]
        if waiting and self._recalled.prefix_ids:
            raise Divergence(
                "an answer was begun by an earlier attempt, but not all of its echo was released"
            )
        if top is None:
            for piece in waiting:
                self._output.add_content(piece.content)
            return None
        echo = ScoredEcho(waiting, answer.bytes_of)
        for content in echo.begin(prompt_ids[0]):
            self._output.add_content(content)
        return None if echo.complete else echo

    def _loop_limits(self, node: str) -> list[int]:
        """The most iterations of each resident loop over `node` in this chain."""
        limits: list[int] = []
        for call in self._ready.walks:
            walk = self._compiled(call.name)
            found = walk.nodes.get(node)
            if found is not None and found.loop > 0 and walk.loop_table[found.loop].resident:
                limits.append(walk.max_iters(call.args)[found.loop])
        return limits

    def _speaks(self, node: str) -> bool:
        """Whether a client reads what `node` says in this chain."""
        found = [self._compiled(call.name).nodes.get(node) for call in self._ready.walks]
        return any(isinstance(route.to, Client) for place in found if place for route in place.routes)


def _choice_of(ready: NodeReady) -> int:
    """Which of several answers to one question the order is for."""
    return max((call.args.get("choice", 0) for call in ready.walks), default=0)


def _kept(run: WalkRun) -> dict[str, Handle]:
    """What a walk results in; the values of a list are told apart by their place: `name.0`, `name.1`."""
    listed = {
        f"{name}.{place}": value
        for name, values in run.accumulated.items()
        for place, value in enumerate(values)
    }
    return run.outputs | listed


def _content(modality: str, value: Handle) -> dict[str, Any]:
    """A tensor as a client gets it: text as text, anything else as bytes with their type and shape."""
    if value.data is None:
        raise TensorGone(f"tensor {value.key}: its bytes do not ride inline, so they cannot be put out")
    if modality == "text":
        return {"text": value.data.decode()}
    metadata = {"dtype": value.dtype, "shape": list(value.shape)}
    return {"modality": modality, "data": value.data, "metadata": metadata}


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    """The first error of a group: the others came of it, or beside it."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
