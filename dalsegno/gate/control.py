"""The level `control`: `react` is run again over the events of each request, as by `dalsegno replay`. Pure.

The replay of a request needs its own records, and those of workers and epochs. So the requests of a log can
be shared out among processes.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final
from zlib import crc32

import msgspec

from conductor.core.replay import Mismatch, Replayer
from dalsegno.gate.differences import DECISION, Difference, between
from dalsegno.gate.results import Examined
from dalsegno.replay import verdicts
from dalsegno.replay.verdicts import ControlResult
from models import registry
from shared.log.port import StoredRecord
from shared.subjects import Subjects

OUTPUT: Final = "output"
"""The event of a difference between an output in the log and the totals that were reported of it."""
RECORD: Final = "record"
"""The event of a difference that is a record which cannot be read, or does not belong where it is."""
TAMPERED: Final = "its records are not as they were sealed: `dalsegno verify` shows which"


def of_log(
    records: Iterable[StoredRecord],
    subjects: Subjects,
    requests: Collection[str],
    source: str,
    damaged: dict[str, str],
    unended: Collection[str] = (),
) -> Examined:
    """Decide the `requests` of a log again.

    Args:
        records: those of the log.
        subjects: those of the log.
        requests: the ids of those to decide.
        source: the name of the log.
        damaged: those that may lack records, with the reason.
        unended: those that have not ended in the log.
    """
    replayer = Replayer(registry.graph, subjects, pins=verdicts.pins)
    own: dict[str | None, list[StoredRecord]] = {}
    for record in records:
        address = subjects.parse(record.subject)
        if address is None or (address.request_id is not None and address.request_id not in requests):
            continue
        replayer.replay_record(record)
        own.setdefault(address.request_id, []).append(record)
    results = [ControlResult(verdict=one) for one in replayer.close().values()]
    for one in results:
        request_id = one.verdict.request_id
        one.cannot = damaged.get(request_id)
        if not one.matches and one.cannot is None:
            its = sorted((*own.get(None, ()), *own.get(request_id, ())), key=lambda record: record.seq)
            one.cannot = verdicts.why_not(its, subjects, request_id)
    return of_results(results, source, unended)


def of_results(results: Sequence[ControlResult], source: str, unended: Collection[str] = ()) -> Examined:
    """The verdicts of a control replay as differences.

    A request in `unended` may lack its last decisions: its log was read before they were stored.
    """
    found = Examined(level="control", source=source)
    pending = 0
    for one in results:
        verdict = one.verdict
        cannot = one.cannot or (TAMPERED if one.is_tampered else None)
        if cannot is not None:
            found.cannot[verdict.request_id] = cannot
            continue
        found.decided[verdict.request_id] = verdict.decided
        if verdict.mismatch is None:
            continue
        if verdict.mismatch.seq is None and verdict.request_id in unended:
            pending += 1
            continue
        found.differences += of_mismatch(verdict.mismatch, verdict.request_id, source)
    if pending:
        found.notes.append(
            f"{pending:,} open {'request lacks its' if pending == 1 else 'requests lack their'} last "
            "decisions, which were not stored yet"
        )
    return found


def of_mismatch(mismatch: Mismatch, request_id: str, source: str) -> list[Difference]:
    """The leaves of one mismatch."""
    recorded, expected = mismatch.recorded, mismatch.expected

    def difference(event: str, name: str, was: Any, becomes: Any) -> Difference:
        return Difference(
            level="control",
            event=event,
            field=name,
            recorded=was,
            found=becomes,
            request_id=request_id,
            source=source,
            seq=mismatch.seq,
        )

    if recorded is None and expected is None:
        return [difference(RECORD, DECISION, None, mismatch.what)]
    if recorded is None or expected is None:
        event = _event(recorded or expected or {})
        sides = [None if side is None else event for side in (recorded, expected)]
        return [difference(event, DECISION, *sides)]
    found = [difference(_event(recorded), *leaf) for leaf in between(recorded, expected)]
    return found or [difference(_event(recorded), DECISION, _event(recorded), None)]


def _event(data: dict[str, Any]) -> str:
    tag = data.get("type")
    return tag.rpartition(".")[0] if isinstance(tag, str) else OUTPUT


def shards(requests: Sequence[str], count: int) -> list[frozenset[str]]:
    """Share out requests among `count` processes, the same way every time."""
    found: list[set[str]] = [set() for _ in range(count)]
    for request_id in requests:
        found[crc32(request_id.encode(errors="surrogatepass")) % count].add(request_id)
    return [frozenset(one) for one in found if one]


def merged(parts: Sequence[Examined]) -> Examined:
    """The results of one level and source that several processes computed, as one."""
    first = parts[0]
    result = msgspec.structs.replace(first, decided={}, differences=[], cannot={}, notes=[])
    for part in parts:
        result.decided |= part.decided
        result.differences += part.differences
        result.cannot |= part.cannot
        result.notes += part.notes
    result.differences.sort(key=lambda one: one.seq or 0)
    return result
