"""What the log holds of a request's output before a step goes on with it.

A pure fold over the records of one request (and the conductors' terms), from the log's beginning. A
first attempt goes on behind what earlier steps put out. A later one reads as far as its own order and the
`output.fence` of its attempt, whichever is the later of the two: chunks that count there were released, so
they are kept, and the step continues behind them; what was computed and not stored nobody saw. What the
steps before it said again, or went on to say, in this attempt stands before its order.

Each track of the output stands for itself: what is said here of an output is said of each. The steps that
speak on a track do so one after the other, the same in every attempt. So where the first of them was done
for the first time, its part of the track ended, and so on for the second and all others; which of them a
step is, follows from how many of them are done before it in its attempt, or were kept by it. (Their indices
do not tell: beside sub-plans that take their time otherwise, they may be others.)
"""

from collections import defaultdict
from dataclasses import dataclass, field

from shared.epoch_fence import EpochFence
from shared.errors import Divergence
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
from shared.subjects import Subjects
from shared.transcript import Transcript
from workers.generation.generated_text import GeneratedText
from workers.generation.output_chunks import OutputState
from workers.orders.inbox import StepKey


@dataclass(frozen=True, slots=True)
class RecoveredTrack:
    """A track so far.

    Attributes:
        state: where it stands.
        prefix_ids, prefix_text: the tokens and text this very step put out in earlier attempts.
        released: its chunks without tokens: they are computed again, and must come out the same.
    """

    state: OutputState = field(default_factory=OutputState)
    prefix_ids: tuple[int, ...] = ()
    prefix_text: str = ""
    released: tuple[OutputChunk, ...] = ()

    def replay(self, answer: GeneratedText) -> None:
        """Fold the step's earlier tokens into its fresh answer.

        Raises:
            Divergence: the tokens do not give the text that was released.
        """
        text = ""
        for place, token_id in enumerate(self.prefix_ids):
            if answer.finish_reason is not None:
                raise Divergence(
                    f"the answer ended ({answer.finish_reason}) after {place} tokens when folded again, "
                    f"but {len(self.prefix_ids)} tokens were released"
                )
            text += answer.push(token_id)
        if text != self.prefix_text:
            pairs = enumerate(zip(text, self.prefix_text, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(self.prefix_text)))
            raise Divergence(
                f"{len(self.prefix_ids)} tokens give another text than was released: they differ from "
                f"character {at} on (released {self.prefix_text[at : at + 20]!r}, now {text[at : at + 20]!r})"
            )


@dataclass(slots=True)
class _Spoken:
    """The steps that spoke on a track.

    Attributes:
        done: index and attempt of those that lead to where the request is.
        bounds: by their place: how many chunks there were when such a step was done for the first time.
    """

    done: list[tuple[int, int]] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)


class OutputRecovery:
    """The fold for one step, of which the order is stored at `seq`.

    Attributes:
        complete: the order and the fence of the step's attempt were read; a first attempt has no fence.
    """

    def __init__(self, subjects: Subjects, key: StepKey, seq: int = 0) -> None:
        self.complete = False
        self._fenced = False
        self._subjects = subjects
        self._key = key
        self._seq = seq
        self._epochs = EpochFence()
        self._transcript = Transcript()
        self._chunks: defaultdict[str, list[OutputChunk]] = defaultdict(list)
        self._spoken: defaultdict[str, _Spoken] = defaultdict(_Spoken)

    def subjects(self) -> list[str]:
        """What is to be read."""
        return [*self._subjects.all_of(self._key.request_id), self._subjects.epoch]

    def fold(self, record: StoredRecord) -> None:
        """Take one record, in log order."""
        if self.complete:
            return
        try:
            event = decode(record.data)
        except MalformedEventError:
            pass  # another's mistake; it was refused where it matters
        else:
            if self._epochs.admits(event):
                self._fold(event)
        self.complete = self._fenced and record.seq >= self._seq

    def _fold(self, event: AnyEvent) -> None:
        match event:
            case OutputChunk() | OutputFence():
                for chunk in self._transcript.fold(event):
                    self._chunks[chunk.track].append(chunk)
                self._fenced |= isinstance(event, OutputFence) and event.attempt >= self._key.attempt
            case NodeReady():  # what lower attempts came to from here on is done again
                for spoken in self._spoken.values():
                    spoken.done = [
                        (index, attempt)
                        for index, attempt in spoken.done
                        if index < event.index or attempt >= event.attempt
                    ]
            case WalkCompleted() if event.attempt >= self._transcript.attempt:
                for track, totals in {"": event.output, **event.tracks}.items():
                    if totals != OutputTotals():  # else it did not speak there
                        self._end(self._spoken[track], event, totals.chunks)
            case _:
                pass

    @staticmethod
    def _end(spoken: _Spoken, event: WalkCompleted, chunks: int) -> None:
        """A step that spoke is done."""
        if any(index == event.index for index, _ in spoken.done):
            return  # a second copy
        spoken.done.append((event.index, event.attempt))
        if len(spoken.done) > len(spoken.bounds):
            spoken.bounds.append(chunks)

    def result(self) -> dict[str, RecoveredTrack]:
        """What the step goes on from, by track; of one that is not there nothing was put out."""
        return {name: self._recalled(name, chunks) for name, chunks in self._chunks.items()}

    def _recalled(self, track: str, chunks: list[OutputChunk]) -> RecoveredTrack:
        state = OutputState(self._transcript.track(track))
        for chunk in chunks:
            state.fold(chunk)
        spoken = self._spoken[track]
        place = sum(index < self._key.step for index, _ in spoken.done)
        bounds = [0, *spoken.bounds, None]
        own = chunks[bounds[place] : bounds[place + 1]]
        of_tokens = [chunk for chunk in own if chunk.token_ids]
        return RecoveredTrack(
            state=state,
            prefix_ids=tuple(id for chunk in of_tokens for id in chunk.token_ids),
            prefix_text="".join(chunk.text for chunk in of_tokens),
            released=tuple(chunk for chunk in own if not chunk.token_ids),
        )
