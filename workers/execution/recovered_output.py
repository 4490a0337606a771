"""Recovered output of a request: the released tokens, text and chunks that a step continues after.

A pure fold over the log records of one request, and the conductors' epochs, from the start of the log:

- A first attempt continues after the output of earlier steps. It reads the log up to the
  present end, unless the worker remembers the state of its tracks and is their only writer (`TrackStates`).
- A later attempt reads up to its own order or the `output.fence` of its attempt, whichever is later. Chunks
  that are valid at that position were released: they stay, and the step continues after them. Output that was
  computed but not stored was never released, and is computed again. What earlier steps emitted in this
  attempt precedes this step's order in the log.

Each track is recovered separately. Steps write a track one after the other, in the same order in every
attempt. The first completion of each writing step therefore marks where its part of the track ends. The part
of the present step follows from the number of writing steps that were completed before it, in this attempt or
in an earlier one whose result this attempt keeps. Step indices do not identify a part: the steps of
concurrent sub-plans interleave differently in each attempt, so a step may have another index.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from shared.checkpoints import Checkpoints, State, is_checkpoint
from shared.epoch_fence import EpochFence
from shared.errors import Divergence, WeightsChangedError
from shared.events import (
    AnyEvent,
    MalformedEventError,
    NodeReady,
    OutputChunk,
    OutputFence,
    OutputTotals,
    WalkCompleted,
    decode,
)
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.subject_rules import check_event_subject
from shared.subjects import Address, Subjects, worker_writer
from workers.generation.generated_text import GeneratedText
from workers.generation.output_chunks import OutputState
from workers.orders.inbox import StepKey


@dataclass(frozen=True, slots=True)
class RecoveredTrack:
    """The recovered output of one track.

    Attributes:
        state: the state of the track after all its valid chunks.
        prefix_ids, prefix_text: tokens and text that this step released in earlier attempts.
        released: chunks without tokens that this step released. They are computed again and must be equal.
    """

    state: OutputState = field(default_factory=OutputState)
    prefix_ids: tuple[int, ...] = ()
    prefix_text: str = ""
    released: tuple[OutputChunk, ...] = ()

    def replay(self, generated: GeneratedText) -> None:
        """Fold the released tokens of this step into its new, empty text.

        Raises:
            Divergence: the tokens give a text other than the released one.
        """
        text = ""
        for index, token_id in enumerate(self.prefix_ids):
            if generated.finish_reason is not None:
                raise Divergence(
                    f"expected a text of the {len(self.prefix_ids)} released tokens, found that it ends "
                    f"({generated.finish_reason}) after {index} of them when replayed"
                )
            text += generated.push(token_id)
        if text != self.prefix_text:
            pairs = enumerate(zip(text, self.prefix_text, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(self.prefix_text)))
            raise Divergence(
                f"expected the {len(self.prefix_ids)} released tokens to give the released text, found a "
                f"difference from character {at} on (released {self.prefix_text[at : at + 20]!r}, "
                f"now {text[at : at + 20]!r})"
            )


@dataclass(slots=True)
class _WriterSteps:
    """The completed steps that wrote a track.

    Attributes:
        done: (index, attempt) of the completed steps that still count.
        bounds: for the n-th such step, the number of chunks at its first completion.
    """

    done: list[tuple[int, int]] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)


class OutputRecovery:
    """The fold for one step, whose order is stored at `seq`.

    Attributes:
        complete: the step's order and the fence of its attempt were read; no more records are needed. Always
            False in a first attempt, which has no fence and ends with the last record.
    """

    def __init__(self, subjects: Subjects, key: StepKey, seq: int = 0) -> None:
        self.complete = False
        self._fenced = False
        self._subjects = subjects
        self._key = key
        self._seq = seq
        self._epochs = EpochFence()
        self._output = RequestOutput()
        self._chunks: defaultdict[str, list[OutputChunk]] = defaultdict(list)
        self._writers: defaultdict[str, _WriterSteps] = defaultdict(_WriterSteps)
        self._checkpoints = Checkpoints()

    def subjects(self) -> list[str]:
        """The subjects to read."""
        return [*self._subjects.all_of(self._key.request_id), self._subjects.epoch]

    def fold(self, record: StoredRecord) -> None:
        """Fold one record, in log order."""
        if self.complete:
            return
        address = self._subjects.parse(record.subject)
        try:
            event = decode(record.data, address.kind if address else None)
            if address is not None:
                check_event_subject(address, event)
        except MalformedEventError:
            pass  # the reader that acts on it refuses it
        else:
            if address is not None and self._epochs.admits(event):
                self._fold(address, event)
        self.complete = self._fenced and record.seq >= self._seq

    def _fold(self, address: Address, event: AnyEvent) -> None:
        if isinstance(event, OutputChunk) and is_checkpoint(event):
            # Those of this attempt are left out: the ranks of a step read to different positions, and all of
            # them have to find the same. What earlier attempts store behind the fence is void for all.
            if event.attempt < self._key.attempt and self._output.advises(address, event):
                self._checkpoints.fold(event)
            return
        for chunk in self._output.fold(address, event):
            self._chunks[chunk.track].append(chunk)
        match event:
            case OutputFence():
                self._fenced |= event.attempt >= self._key.attempt
            case NodeReady():  # its step and later ones run again; their lower attempts no longer count
                for steps in self._writers.values():
                    steps.done = [
                        (index, attempt)
                        for index, attempt in steps.done
                        if index < event.index or attempt >= event.attempt
                    ]
            case WalkCompleted() if self._counts(event):
                for track, totals in {"": event.output, **event.tracks}.items():
                    if totals != OutputTotals():  # else the step did not write this track
                        self._complete_step(self._writers[track], event, totals.chunks)
            case _:
                pass

    def _counts(self, event: WalkCompleted) -> bool:
        """True for a completion of the present attempt by a rank that the request is placed on."""
        is_placed = self._output.may_write(worker_writer(event.rank), event.incarnation)
        return is_placed and event.attempt >= self._output.transcript.attempt

    @staticmethod
    def _complete_step(steps: _WriterSteps, event: WalkCompleted, chunks: int) -> None:
        """Fold the completion of a step that wrote the track."""
        if any(index == event.index for index, _ in steps.done):
            return  # a duplicate
        steps.done.append((event.index, event.attempt))
        if len(steps.done) > len(steps.bounds):
            steps.bounds.append(chunks)

    def check_weights(self, since: int) -> None:
        """Check that no output was released before the attempt `since`, which other weights computed.

        Raises:
            WeightsChangedError: some was: this worker cannot continue it.
        """
        released = {chunk.attempt for chunks in self._chunks.values() for chunk in chunks}
        if any(attempt < since for attempt in released):
            raise WeightsChangedError(
                "the answer was begun with other weights than those loaded now: its worker has restarted "
                "with a changed checkpoint, and no answer is written by two models; send the request again"
            )

    def result(self) -> dict[str, RecoveredTrack]:
        """The recovered tracks by name; a track without output is missing."""
        return {name: self._track(name, chunks) for name, chunks in self._chunks.items()}

    def checkpoints(self, since: int = 0) -> dict[str, State]:
        """The newest states of earlier attempts, by place, without those of attempts before `since`."""
        return self._checkpoints.states(since)

    def _track(self, track: str, chunks: list[OutputChunk]) -> RecoveredTrack:
        state = OutputState(self._output.transcript.track(track))
        for chunk in chunks:
            state.fold(chunk)
        steps = self._writers[track]
        part = sum(index < self._key.step for index, _ in steps.done)
        bounds = [0, *steps.bounds, None]
        own = chunks[bounds[part] : bounds[part + 1]]
        of_tokens = [chunk for chunk in own if chunk.token_ids]
        return RecoveredTrack(
            state=state,
            prefix_ids=tuple(id for chunk in of_tokens for id in chunk.token_ids),
            prefix_text="".join(chunk.text for chunk in of_tokens),
            released=tuple(chunk for chunk in own if not chunk.token_ids),
        )
