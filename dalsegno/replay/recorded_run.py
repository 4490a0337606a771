"""A recorded run of a request's nodes, read from its log records: steps, results, output chunks. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from dalsegno.bundle import manifest
from dalsegno.bundle.bundle_file import LeftOut
from models.sequence_request import runs_token_program, samples_tokens
from shared.epoch_fence import EpochFence
from shared.events import NodeReady, OutputChunk, TokenLogprobs, WalkCompleted, WalkResult
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.subjects import Subjects, worker_writer


@dataclass(slots=True)
class RecordedStep:
    """One step of a plan run, as the log has it.

    Attributes:
        order: the order to one of its ranks, in the attempt that counted.
        after: the steps that were done when it was ordered.
        results: the results of its walks, of all ranks; empty until it is done.
    """

    order: NodeReady
    after: frozenset[int]
    results: dict[str, WalkResult] = field(default_factory=dict)

    @property
    def walks(self) -> str:
        return " then ".join(walk.name for walk in self.order.walks)

    @property
    def samples_tokens(self) -> bool:
        """True if one of its walks samples tokens on a KV node."""
        return any(map(samples_tokens, self.order.walks))

    @property
    def runs_token_program(self) -> bool:
        """True if its tokens come from a program, several at a time."""
        return any(map(runs_token_program, self.order.walks))


@dataclass(slots=True)
class Run:
    """One run of a request's nodes: the recorded one, or a repetition.

    Attributes:
        steps: by index.
        tracks: the valid chunks of each output track.
        left_out: for each chunk, the description of data that is not in the bundle, or None.
        steps_before_output: the number of steps that were done before the first chunk.
    """

    steps: dict[int, RecordedStep] = field(default_factory=dict)
    tracks: dict[str, list[OutputChunk]] = field(default_factory=dict)
    left_out: dict[str, list[LeftOut | None]] = field(default_factory=dict)
    steps_before_output: int | None = None

    def tokens(self, track: str) -> list[int]:
        return [token for chunk in self.tracks.get(track, ()) for token in chunk.token_ids]

    def logprobs(self, track: str) -> list[TokenLogprobs]:
        """The log probabilities of the answer's tokens, if they were requested."""
        return [one for c in self.tracks.get(track, ()) if not c.is_echo for one in c.logprobs or ()]

    def boundary_after(self, track: str, place: int) -> int:
        """The number of tokens up to the end of the chunk that has the token at `place`.

        There ends an emission, too, if the tokens come from a token program.
        """
        count = 0
        for chunk in self.tracks.get(track, ()):
            count += len(chunk.token_ids)
            if count > place:
                break
        return count

    def cut_like(self, other: "Run", track: str) -> None:
        """Drop the tokens of a track, and their text, that go beyond those of another run."""
        with_tokens = [chunk for chunk in self.tracks[track] if chunk.token_ids]
        if not with_tokens:
            return
        length = sum(len(chunk.text) for chunk in other.tracks.get(track, ()) if chunk.token_ids)
        whole = msgspec.structs.replace(
            with_tokens[0],
            token_ids=self.tokens(track)[: len(other.tokens(track))],
            text="".join(chunk.text for chunk in with_tokens)[:length],
        )
        chunks = [chunk for chunk in self.tracks[track] if not chunk.token_ids]
        self.tracks[track], self.left_out[track] = [*chunks, whole], [None] * (len(chunks) + 1)

    def text(self, track: str) -> str:
        return "".join(chunk.text for chunk in self.tracks.get(track, ()))


def run_of(
    records: Iterable[StoredRecord],
    subjects: Subjects,
    request_id: str,
    left_out: Mapping[int, LeftOut] | None = None,
) -> Run:
    """Read a request's run from log records."""
    run, output, fence = Run(), RequestOutput(), EpochFence()
    done: dict[int, int] = {}
    at: dict[str, int] = {}
    for record in records:
        address, event = subjects.parse(record.subject), manifest.event_of(record, subjects)
        if address is None or event is None or not fence.admits(event) or address.request_id != request_id:
            continue
        if isinstance(event, OutputChunk):
            at.setdefault(event.id, record.seq)
        for chunk in output.fold(address, event):
            if run.steps_before_output is None:
                run.steps_before_output = len(done)
            run.tracks.setdefault(chunk.track, []).append(chunk)
            run.left_out.setdefault(chunk.track, []).append((left_out or {}).get(at[chunk.id]))
        match event:
            case NodeReady():
                _take_order(run, done, event)
            case WalkCompleted() if output.may_write(worker_writer(event.rank), event.incarnation):
                step = run.steps.get(event.index)
                if step is not None and step.order.attempt == event.attempt:
                    _merge(step.results, event.results)
                    done[event.index] = event.attempt
            case _:
                pass
    return run


def _take_order(run: Run, done: dict[int, int], event: NodeReady) -> None:
    """Register an order: a step's first, one for another rank, or a new attempt, which voids later steps."""
    known = run.steps.get(event.index)
    if known is not None and event.attempt <= known.order.attempt:
        return
    for index in [i for i, step in run.steps.items() if i >= event.index]:
        if run.steps[index].order.attempt < event.attempt:
            del run.steps[index]
            done.pop(index, None)
    run.steps[event.index] = RecordedStep(event, frozenset(done))


def _merge(known: dict[str, WalkResult], new: Iterable[WalkResult]) -> None:
    for one in new:
        before = known.get(one.name)
        if before is not None:
            facts, outputs = before.facts | one.facts, before.outputs | one.outputs
            one = WalkResult(name=one.name, facts=facts, outputs=outputs)  # noqa: PLW2901 - both ranks' parts
        known[one.name] = one
