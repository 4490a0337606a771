"""A recorded run of a request's nodes, read from its log records: steps, results, output chunks. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.bundle import manifest
from dalsegno.bundle.bundle_file import LeftOut
from shared.events import NodeReady, OutputChunk, OutputFence, TokenLogprobs, WalkCompleted, WalkResult
from shared.log.port import StoredRecord
from shared.subjects import Subjects
from shared.transcript import Transcript


@dataclass(slots=True)
class RecordedStep:
    """One step of a journey, as the log has it.

    Attributes:
        order: as one of its ranks was told it, in the attempt that counted.
        behind: the steps that were done when it was ordered.
        results: what its walks came to, of all ranks; none while it was not done.
    """

    order: NodeReady
    behind: frozenset[int]
    results: dict[str, WalkResult] = field(default_factory=dict)

    @property
    def walks(self) -> str:
        return " then ".join(walk.name for walk in self.order.walks)


@dataclass(slots=True)
class Run:
    """What one run of a request's nodes came to: the recorded one, or one that was made from it.

    Attributes:
        steps: by index.
        tracks: the chunks that count, by writer.
        left_out: of chunks whose data is not there, by the log's position: what it was.
        speaks_at: how many steps were done before the first chunk.
    """

    steps: dict[int, RecordedStep] = field(default_factory=dict)
    tracks: dict[str, list[OutputChunk]] = field(default_factory=dict)
    left_out: dict[str, list[LeftOut | None]] = field(default_factory=dict)
    speaks_at: int | None = None

    def tokens(self, track: str) -> list[int]:
        return [token for chunk in self.tracks.get(track, ()) for token in chunk.token_ids]

    def logprobs(self, track: str) -> list[TokenLogprobs]:
        """Of the answer's tokens, where they were asked for; none where they were not."""
        return [one for c in self.tracks.get(track, ()) if not c.is_echo for one in c.logprobs or ()]

    def text(self, track: str) -> str:
        return "".join(chunk.text for chunk in self.tracks.get(track, ()))


def run_of(
    records: Iterable[StoredRecord],
    subjects: Subjects,
    request_id: str,
    left_out: Mapping[int, LeftOut] | None = None,
) -> Run:
    """Read a run out of a log."""
    run, transcript = Run(), Transcript()
    done: dict[int, int] = {}
    at: dict[str, int] = {}
    for record in records:
        address, event = subjects.parse(record.subject), manifest.event_of(record, subjects)
        if address is None or address.request_id != request_id:
            continue
        match event:
            case NodeReady():
                _take_order(run, done, event)
            case WalkCompleted():
                step = run.steps.get(event.index)
                if step is not None and step.order.attempt == event.attempt:
                    _merge(step.results, event.results)
                    done[event.index] = event.attempt
            case OutputChunk() | OutputFence():
                at[event.id] = record.seq
                for chunk in transcript.fold(event):
                    if run.speaks_at is None:
                        run.speaks_at = len(done)
                    run.tracks.setdefault(chunk.track, []).append(chunk)
                    gone = (left_out or {}).get(at[chunk.id])
                    run.left_out.setdefault(chunk.track, []).append(gone)
            case _:
                pass
    return run


def _take_order(run: Run, done: dict[int, int], event: NodeReady) -> None:
    """A step is ordered: for the first time, of another rank, or again; then what came behind it is void."""
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
