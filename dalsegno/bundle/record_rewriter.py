"""A request's records with other contents in the same places, which a replay takes as it takes the log's.

Some of what a log holds is not for a file that is passed on: what lets one worker read another's tensors
(always), and what a client wrote and was answered (where that is asked for). But decisions carry digests of
the facts before them, so nothing can be taken out of a log that still agrees with itself.

So it is decided again. Facts are rewritten one by one and folded, beside the log's own; where the log has a
decision that follows from its facts, there comes the decision that follows from the rewritten ones. A
decision that did not follow is rewritten like a fact: what was wrong before stays wrong.
"""

from collections.abc import Callable, Iterable

import msgspec

from conductor.core.cluster import Cluster, Entry
from conductor.core.replay import Replayer
from conductor.core.request import Decision, same
from dalsegno.bundle.redaction import Redaction, Rewrite
from models.base import ModelGraph
from shared.events import (
    AnyEvent,
    OutputChunk,
    OutputFence,
    OutputTotals,
    RequestAdmitted,
    WalkCompleted,
    encode,
)
from shared.log.port import StoredRecord
from shared.subjects import Subjects
from shared.transcript import Transcript


def rewritten(
    records: Iterable[StoredRecord],
    rewrite: Rewrite,
    *,
    graph_of: Callable[[str], ModelGraph],
    subjects: Subjects,
) -> list[StoredRecord]:
    """The records, rewritten; one in whose bytes nothing is to be changed is the same object."""
    rewriting = _Rewriting(rewrite, graph_of, subjects)
    return [rewriting.take(record) for record in records]


def unfaithful(
    before: Iterable[StoredRecord],
    after: Iterable[StoredRecord],
    *,
    graph_of: Callable[[str], ModelGraph],
    subjects: Subjects,
) -> dict[str, str]:
    """Requests that matched in the log and do not as they were rewritten, and what does not match."""
    sound = Replayer(graph_of, subjects).run(before)
    found = Replayer(graph_of, subjects).run(after)
    return {
        request_id: verdict.mismatch.what
        for request_id, verdict in found.items()
        if verdict.mismatch is not None and request_id in sound and sound[request_id].matches
    }


class _Rewriting:
    """Two folds side by side: of the log as it is, and as it is rewritten."""

    def __init__(self, rewrite: Rewrite, graph_of: Callable[[str], ModelGraph], subjects: Subjects) -> None:
        self._rewrite = rewrite
        self._subjects = subjects
        self._old = Cluster(graph_of, subjects)
        self._new = Cluster(graph_of, subjects)
        self._decided: dict[str, Decision] = {}
        self._spoken: dict[str, tuple[Transcript, Transcript]] = {}
        self._totals: dict[str, str] = {}

    def take(self, record: StoredRecord) -> StoredRecord:
        entry = self._old.read(record)
        if not isinstance(entry, Entry):
            return self._unreadable(record)
        event = entry.event
        old, new = self._decisions(event, self._old), self._decisions(event, self._new)
        if (decision := old.get(event.id)) is not None and same(event, decision) and event.id in new:
            self._decided[event.id] = new[event.id]
        self._old.apply(entry)
        changed = self._changed(event, entry.address.request_id)
        if isinstance(event, OutputChunk | OutputFence):
            assert isinstance(changed, OutputChunk | OutputFence)
            self._speak(event, changed)
        if changed != event:
            record = msgspec.structs.replace(record, data=encode(changed))
        self._new.fold(record)
        return record

    @staticmethod
    def _decisions(event: AnyEvent, cluster: Cluster) -> dict[str, Decision]:
        request = cluster.request(event.request_id) if event.request_id else None
        expected = dict(request.expected) if request is not None else {}
        return expected | cluster.refusals

    def _changed(self, event: AnyEvent, request_id: str | None) -> AnyEvent:
        if (decision := self._decided.get(event.id)) is not None and type(decision) is type(event):
            return msgspec.structs.replace(
                decision, writer=event.writer, number=event.number, epoch=event.epoch
            )
        changed = self._rewrite(event, request_id)
        match changed:
            case WalkCompleted():
                tracks = {name: self._told(totals) for name, totals in changed.tracks.items()}
                return msgspec.structs.replace(changed, output=self._told(changed.output), tracks=tracks)
            case RequestAdmitted():
                old, new = self._old.request(str(request_id)), self._new.request(str(request_id))
                if old is not None and new is not None and changed.pins.submission == old.digest:
                    pins = msgspec.structs.replace(changed.pins, submission=new.digest)
                    return msgspec.structs.replace(changed, pins=pins)
            case _:
                pass
        return changed

    def _speak(self, old: OutputChunk | OutputFence, new: OutputChunk | OutputFence) -> None:
        """Fold a piece of the output in both versions, and note what each digest is in the other."""
        was, becomes = self._spoken.setdefault(str(old.request_id), (Transcript(), Transcript()))
        was.fold(old)
        becomes.fold(new)
        if isinstance(old, OutputChunk):
            track = old.track
            self._totals[was.track(track).totals.digest] = becomes.track(track).totals.digest
            self._totals[was.totals.digest] = becomes.totals.digest

    def _told(self, totals: OutputTotals) -> OutputTotals:
        return msgspec.structs.replace(totals, digest=self._totals.get(totals.digest, totals.digest))

    def _unreadable(self, record: StoredRecord) -> StoredRecord:
        """What nobody could read is not to be read here either; `rewrite` says so of nothing in it."""
        changed = record
        if isinstance(self._rewrite, Redaction):
            changed = msgspec.structs.replace(record, data=self._rewrite.blank(record.data))
        self._new.fold(changed)
        return changed
