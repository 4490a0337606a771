"""What the log holds of a request's output before a step goes on with it.

A pure fold over the records of one request (and the conductors' terms), from the log's beginning. A
first attempt goes on behind what earlier steps put out. A later one reads as far as the
`output.fence` of its own attempt: chunks that count there were released, so they are kept, and the step
continues behind them; what was computed and not stored nobody saw.

Each track of the output stands for itself: what is said here of an output is said of each.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from shared.errors import Divergence
from shared.events import MalformedEventError, OutputChunk, OutputFence, WalkCompleted, decode
from shared.fence import EpochFence
from shared.log.port import StoredRecord
from shared.subjects import Subjects
from shared.transcript import Transcript
from workers.answer import Answer
from workers.inbox import StepKey
from workers.output import OutputState


@dataclass(frozen=True, slots=True)
class Recalled:
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

    def replay(self, answer: Answer) -> None:
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


class Recall:
    """The fold for one step.

    Attributes:
        complete: the fence of the step's attempt was read; a first attempt has none.
    """

    def __init__(self, subjects: Subjects, key: StepKey) -> None:
        self.complete = False
        self._subjects = subjects
        self._key = key
        self._epochs = EpochFence()
        self._transcript = Transcript()
        self._chunks: defaultdict[str, list[OutputChunk]] = defaultdict(list)
        self._before: defaultdict[str, int] = defaultdict(int)  # how many were put out by earlier steps

    def subjects(self) -> list[str]:
        """What is to be read."""
        return [*self._subjects.all_of(self._key.request_id), self._subjects.epoch]

    def fold(self, record: StoredRecord) -> None:
        """Take one record, in log order."""
        try:
            event = decode(record.data)
        except MalformedEventError:
            return  # another's mistake; it was refused where it matters
        if self.complete or not self._epochs.admits(event):
            return
        match event:
            case OutputChunk() | OutputFence():
                for chunk in self._transcript.fold(event):
                    self._chunks[chunk.track].append(chunk)
                self.complete = isinstance(event, OutputFence) and event.attempt >= self._key.attempt
            case WalkCompleted() if event.index < self._key.step:
                for track, totals in {"": event.output, **event.tracks}.items():
                    self._before[track] = max(self._before[track], totals.chunks)
            case _:
                pass

    def result(self) -> dict[str, Recalled]:
        """What the step goes on from, by track; of one that is not there nothing was put out."""
        return {name: self._recalled(name, chunks) for name, chunks in self._chunks.items()}

    def _recalled(self, track: str, chunks: list[OutputChunk]) -> Recalled:
        state = OutputState(self._transcript.track(track))
        for chunk in chunks:
            state.fold(chunk)
        own = chunks[self._before[track] :]
        of_tokens = [chunk for chunk in own if chunk.token_ids]
        return Recalled(
            state=state,
            prefix_ids=tuple(id for chunk in of_tokens for id in chunk.token_ids),
            prefix_text="".join(chunk.text for chunk in of_tokens),
            released=tuple(chunk for chunk in own if not chunk.token_ids),
        )
