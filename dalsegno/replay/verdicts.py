"""Results of a control replay, as text and as JSON.

A request *matches*, *differs* (its first mismatch is shown), or *cannot* be replayed here, with the reason.
The last two give exit status 1.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final

import click
import msgspec

from conductor.core.cluster import Cluster
from conductor.core.lifecycle import Phase
from conductor.core.replay import Mismatch, Verdict, differences
from conductor.digests import core_digest
from dalsegno.history import seals
from dalsegno.terminal.sanitise import plain
from models import registry
from models.registry import UnknownFamilyError
from shared.events import MalformedEventError, RequestAdmitted, decode
from shared.log.port import StoredRecord
from shared.request_output import RequestOutput
from shared.sealing.findings import Level
from shared.sealing.request_check import RequestReport
from shared.subjects import CONDUCTOR_WRITER, Address, Subjects, worker_writer

_SHOWN_CHARS: Final = 12
"""Characters of a digest that are shown."""


class ControlResult(msgspec.Struct, kw_only=True):
    """The result of one request's control replay.

    Attributes:
        source: the bundle it is from; None for a log.
        cannot: the reason why it cannot be replayed here.
        outputs_compared: False if not all bytes of its answer were available.
        seals: the comparison with the seals of its log; None if it was not made.
    """

    verdict: Verdict
    source: str | None = None
    cannot: str | None = None
    outputs_compared: bool = True
    seals: RequestReport | None = None

    @property
    def matches(self) -> bool:
        return self.cannot is None and self.verdict.matches and not self.is_tampered

    @property
    def is_tampered(self) -> bool:
        """True if the records are not those that were sealed."""
        return self.seals is not None and self.seals.level is Level.CHANGED


@cache
def pins(family: str) -> dict[str, str]:
    """The digests in force here, named as `shared.events.Pins` names them."""
    core = {"core": core_digest()}
    try:
        return core | {"graph": registry.graph(family).digest, "plan": registry.plan_digest(family)}
    except UnknownFamilyError:  # reported by that request's replay; the others are replayed
        return core | {"graph": "unknown here", "plan": "unknown here"}


# ---- why not -----------------------------------------------------------------------------------------


def why_not(records: Iterable[StoredRecord], subjects: Subjects, request_id: str) -> str | None:
    """Return the reason why this installation cannot replay a request, or None."""
    output = RequestOutput()
    for record in records:
        address = subjects.parse(record.subject)
        if address is None or address.request_id not in (None, request_id):
            continue
        try:
            event = decode(record.data, address.kind)
        except MalformedEventError:
            tag = unknown_tag(record.data)
            if tag is not None and _may_decide(address, output):
                return (
                    f"record {record.seq} is a {tag}, which this version does not know: "
                    "replay it with the version that wrote it, or a later one"
                )
            continue
        if address.request_id == request_id:
            output.fold(address, event)
        if isinstance(event, RequestAdmitted) and address.request_id == request_id:
            try:
                registry.graph(event.family)
            except UnknownFamilyError as error:
                return f"its family is not installed here: {error.message}"
    return None


def _may_decide(address: Address, output: RequestOutput) -> bool:
    """Tell whether a decision can depend on a record: its writer is the conductor, or has an order.

    Any process may write what it likes on its own subjects; a request can be replayed all the same.
    """
    if address.kind in {"done", "output"}:
        writer = worker_writer(address.rank) if address.rank is not None else str(address.writer)
        return writer == CONDUCTOR_WRITER or output.is_placed_on(writer)
    return address.kind in {"request", "walk", "ready", "conductor"}


def unknown_tag(data: bytes) -> str | None:
    """The type of a record's event, if this version does not know it."""
    try:
        raw = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    tag = raw.get("type") if isinstance(raw, dict) else None
    known = {str(kind.__struct_config__.tag) for kind in Cluster.HANDLERS}
    return tag if isinstance(tag, str) and tag not in known else None


# ---- output ------------------------------------------------------------------------------------------


def print_result(outcome: ControlResult, *, as_json: bool, say: Callable[[str], None] = click.echo) -> None:
    """Print a result."""
    if as_json:
        say(json.dumps(as_plain(outcome), ensure_ascii=False))
        return
    for line in lines(outcome):
        say(plain(line))


def lines(outcome: ControlResult) -> list[str]:
    """A result as text: what its seals say, and what the replay found."""
    verdict = outcome.verdict
    whose = verdict.request_id if outcome.source is None else f"{outcome.source}: {verdict.request_id}"
    said = seals.lines(outcome.seals) if outcome.seals is not None else []
    return [*(f"{whose}: {line}" for line in said), *_replayed(outcome, whose)]


def finding(outcome: ControlResult) -> str:
    """What the replay found, without its notes and details."""
    verdict = outcome.verdict
    if outcome.cannot is not None:
        return f"cannot be replayed: {outcome.cannot}"
    if verdict.mismatch is None:
        return _matching(verdict)
    decisions = "1 decision matches" if verdict.decided == 1 else f"{verdict.decided} decisions match"
    return f"{decisions}, then: {verdict.mismatch.what}"


def _replayed(outcome: ControlResult, whose: str) -> list[str]:
    verdict = outcome.verdict
    if outcome.cannot is not None:
        return [f"{whose}: {finding(outcome)}"]
    shown = [f"{whose}: note: digest of {pin}" for pin in verdict.pins]
    shown += [f"{whose}: note: {change}" for change in verdict.changed_weights]
    for objection, count in verdict.ignored.items():
        records = "1 record is" if count == 1 else f"{count} records are"
        shown.append(f"{whose}: note: {records} void: {objection}")
    if not outcome.outputs_compared:
        shown.append(f"{whose}: note: outputs are not compared, because the bundle lacks some of their bytes")
    shown.append(f"{whose}: {finding(outcome)}")
    details = explained(verdict.mismatch) if verdict.mismatch is not None else []
    return [*shown, *(f"  {line}" for line in details)]


def so_far(verdict: Verdict) -> str:
    """The state of a replay that has not reached the end."""
    if verdict.mismatch is not None:
        return f"{verdict.decided} matched, then: {verdict.mismatch.what}"
    return f"{verdict.decided} decided so far, all as recorded ({verdict.events} events)"


def weights_of(results: Sequence[ControlResult]) -> list[str]:
    """The recorded weights, each with the number of admitted requests; and those without any."""
    counts: Counter[str] = Counter()
    for one in results:
        nodes = {key: digest for key, digest in one.verdict.weights.items() if "/" not in key}
        named = ", ".join(f"{node} {digest[:_SHOWN_CHARS]}" for node, digest in sorted(nodes.items()))
        if named or one.verdict.adopted:
            counts[named or "not recorded, by an older version"] += 1
    many = len(results) > 1
    return [
        f"weights: {named}" + (f" ({count} {'request' if count == 1 else 'requests'})" if many else "")
        for named, count in sorted(counts.items())
    ]


def summary(results: Sequence[ControlResult]) -> str:
    """Counts of matching, differing and impossible requests; the caller appends the time."""
    differ = sum(one.cannot is None and not one.matches for one in results)
    cannot = sum(one.cannot is not None for one in results)
    matching = len(results) - differ - cannot
    shown = f"{matching} of {len(results)} requests match"
    if differ:
        shown += f"; {differ} {'differs' if differ == 1 else 'differ'}"
    return shown + (f"; {cannot} cannot be replayed" if cannot else "")


def _matching(verdict: Verdict) -> str:
    if verdict.phase is Phase.REJECTED:
        return f"rejected, as recorded: {verdict.refusal}"
    if not verdict.adopted and not verdict.decided:
        return f"{verdict.phase}: nothing is decided yet"
    decisions = (
        "the one decision matches" if verdict.decided == 1 else f"all {verdict.decided} decisions match"
    )
    admission = "; the admission was taken as recorded" if verdict.adopted else ""
    return f"{verdict.phase}: {decisions} (control replay of {verdict.events} events{admission})"


def explained(mismatch: Mismatch) -> list[str]:
    """All details of a mismatch."""
    shown = [] if mismatch.seq is None else [f"at: record {mismatch.seq}"]
    if mismatch.expected is not None and mismatch.recorded is not None:
        shown += [f"differs: {line}" for line in differences(mismatch.expected, mismatch.recorded)]
    for name, value in (("expected", mismatch.expected), ("recorded", mismatch.recorded)):
        shown.append(f"{name}: {_json(value) if value is not None else 'nothing'}")
    if mismatch.state is not None:
        shown.append(f"state before: {_json(mismatch.state)}")
    return shown


def as_plain(outcome: ControlResult) -> dict[str, Any]:
    """A result as JSON values."""
    verdict = outcome.verdict
    return {
        "level": "control",
        "request_id": verdict.request_id,
        "source": outcome.source,
        "matches": outcome.matches,
        "cannot_replay": outcome.cannot,
        "phase": str(verdict.phase),
        "events": verdict.events,
        "refusal": verdict.refusal,
        "decided": verdict.decided,
        "adopted": verdict.adopted,
        "outputs_compared": outcome.outputs_compared,
        "differing_digests": verdict.pins,
        "weights": verdict.weights,
        "changed_weights": verdict.changed_weights,
        "ignored": verdict.ignored,
        "seals": None if outcome.seals is None else seals.as_plain(outcome.seals),
        "mismatch": None if verdict.mismatch is None else mismatch_as_plain(verdict.mismatch),
    }


def mismatch_as_plain(mismatch: Mismatch) -> dict[str, Any]:
    """A mismatch as JSON values."""
    return {
        "seq": mismatch.seq,
        "what": mismatch.what,
        "expected": mismatch.expected,
        "recorded": mismatch.recorded,
        "state_before": mismatch.state,
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
