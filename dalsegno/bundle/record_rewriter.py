"""Rewriting of a request's records with other contents, so that a replay accepts them like the log's.

Some contents of a log must not leave it: memory endpoints (always), and the client's text and the answers (on
request). But each decision contains digests of the facts before it, so a log with parts removed contradicts
itself.

So the request is decided again. Facts are rewritten one by one and folded, in parallel with the log's own;
where the log has a decision that follows from its facts, the result has the decision that follows from the
rewritten facts. A decision that did not follow is rewritten like a fact: a mismatch of the log stays a
mismatch.
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
    OutputTotals,
    RequestAdmitted,
    WalkCompleted,
    encode,
)
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.subjects import Address, Subjects
from shared.transcript import FORM


def rewritten(
    records: Iterable[StoredRecord],
    rewrite: Rewrite,
    *,
    graph_of: Callable[[str], ModelGraph],
    subjects: Subjects,
) -> list[StoredRecord]:
    """Return the rewritten records; a record without changes is the same object."""
    rewriter = _RecordRewriter(rewrite, graph_of, subjects)
    return [rewriter.take(record) for record in records]


def unfaithful(
    before: Iterable[StoredRecord],
    after: Iterable[StoredRecord],
    *,
    graph_of: Callable[[str], ModelGraph],
    subjects: Subjects,
) -> dict[str, str]:
    """Return the requests that matched in the log and no longer match, with the mismatch of each."""
    sound = Replayer(graph_of, subjects).run(before)
    found = Replayer(graph_of, subjects).run(after)
    return {
        request_id: verdict.mismatch.what
        for request_id, verdict in found.items()
        if verdict.mismatch is not None and request_id in sound and sound[request_id].matches
    }


class _RecordRewriter:
    """Two folds in parallel: of the log, and of the rewritten records."""

    def __init__(self, rewrite: Rewrite, graph_of: Callable[[str], ModelGraph], subjects: Subjects) -> None:
        self._rewrite = rewrite
        self._subjects = subjects
        self._old = Cluster(graph_of, subjects)
        self._new = Cluster(graph_of, subjects)
        self._decided: dict[str, Decision] = {}
        self._outputs: dict[str, tuple[RequestOutput, RequestOutput]] = {}
        self._digests: dict[tuple[int, str], str] = {}

    def take(self, record: StoredRecord) -> StoredRecord:
        entry = self._old.read(record)
        if not isinstance(entry, Entry):
            return self._unreadable(record)
        event = entry.event
        old, new = self._decisions(event, self._old), self._decisions(event, self._new)
        if (decision := old.get(event.id)) is not None and same(event, decision) and event.id in new:
            self._decided[event.id] = new[event.id]
        is_void = self._old.apply(entry).void
        changed = self._changed(event, entry.address.request_id)
        if entry.address.request_id is not None and not is_void:
            self._fold_output(entry.address, event, changed)
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
                tracks = {name: self._with_new_digest(totals) for name, totals in changed.tracks.items()}
                return msgspec.structs.replace(
                    changed, output=self._with_new_digest(changed.output), tracks=tracks
                )
            case RequestAdmitted():
                old, new = self._old.request(str(request_id)), self._new.request(str(request_id))
                if old is not None and new is not None and changed.pins.submission == old.digest:
                    pins = msgspec.structs.replace(changed.pins, submission=new.digest)
                    return msgspec.structs.replace(changed, pins=pins)
            case _:
                pass
        return changed

    def _fold_output(self, address: Address, old: AnyEvent, new: AnyEvent) -> None:
        """Fold an event in both versions, and map the old digests of the output to the new ones."""
        key = str(address.request_id)
        was, becomes = self._outputs.setdefault(key, (RequestOutput(), RequestOutput()))
        was.fold(address, old)
        becomes.fold(address, new)
        if not isinstance(old, OutputChunk):
            return
        before, after = was.transcript, becomes.transcript
        for form in range(FORM + 1):
            for one, other in ((before.track(old.track), after.track(old.track)), (before, after)):
                digest = one.totals_of(form).digest
                self._digests[form, digest] = other.totals_of(form).digest

    def _with_new_digest(self, totals: OutputTotals) -> OutputTotals:
        digest = self._digests.get((totals.form, totals.digest), totals.digest)
        return msgspec.structs.replace(totals, digest=digest)

    def _unreadable(self, record: StoredRecord) -> StoredRecord:
        """Rewrite a record that cannot be decoded; a redaction blanks it."""
        changed = record
        if isinstance(self._rewrite, Redaction):
            changed = msgspec.structs.replace(record, data=self._rewrite.blank(record.data))
        self._new.fold(changed)
        return changed
