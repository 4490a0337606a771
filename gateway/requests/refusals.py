"""The requests that this gateway refused since its last event about them: exact counts, and a few samples.

Pure, and bounded whatever clients send. An event has at most `MAX_ROWS` counts and `MAX_SAMPLES` samples, and
all of its texts are cut. There is one count for each combination of code, status and tenant; all three are
ours, not the client's. The samples are the first of each combination, and among them different routes and
fields come before repetitions: so a flood of one kind hides no other kind, nor another tenant's. What does
not fit waits for the next event.
"""

from dataclasses import dataclass, field
from typing import Final

from shared.events import Refusal, RefusalCount, RequestsRefused

MAX_ROWS: Final = 64
MAX_SAMPLES: Final = 16
SAMPLES_PER_ROW: Final = 4
MESSAGE_CHARS: Final = 200
"""The length of a sample's message; `NAME_CHARS` is that of its other texts."""
NAME_CHARS: Final = 128

_Key = tuple[str, int, str | None]


@dataclass(slots=True)
class _Row:
    """The refusals of one code, status and tenant."""

    since_ns: int
    count: int = 0
    samples: list[Refusal] = field(default_factory=list)

    def add(self, refusal: Refusal) -> None:
        """Count a refusal. A new route or field takes the place of the last sample that repeats one."""
        self.count += 1
        if len(self.samples) < SAMPLES_PER_ROW:
            self.samples.append(refusal)
            return
        found = [(one.route, one.param) for one in self.samples]
        repeated = [place for place, kind in enumerate(found) if kind in found[:place]]
        if repeated and (refusal.route, refusal.param) not in found:
            del self.samples[repeated[-1]]
            self.samples.append(refusal)


class RefusalTally:
    """The refusals that no event tells of yet."""

    def __init__(self) -> None:
        self._rows: dict[_Key, _Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, refusal: Refusal) -> None:
        """Count a refusal, and keep it as a sample if it is one of the first of its kind."""
        key = (refusal.code, refusal.status, refusal.tenant)
        self._rows.setdefault(key, _Row(since_ns=refusal.time_ns)).add(refusal)

    def take(self, event_id: str, writer: str) -> RequestsRefused | None:
        """Return the next event, whose refusals are then forgotten here; None if there are none."""
        keys = list(self._rows)[:MAX_ROWS]
        if not keys:
            return None
        rows = {key: self._rows.pop(key) for key in keys}
        counts = [
            RefusalCount(code=code, status=status, tenant=tenant, count=row.count)
            for (code, status, tenant), row in rows.items()
        ]
        # The first of each kind, then the second of each, as long as there is room.
        ranked = [
            row.samples[place]
            for place in range(SAMPLES_PER_ROW)
            for row in rows.values()
            if place < len(row.samples)
        ]
        return RequestsRefused(
            id=event_id,
            writer=writer,
            since_ns=min(row.since_ns for row in rows.values()),
            counts=counts,
            samples=sorted(ranked[:MAX_SAMPLES], key=lambda one: one.time_ns),
        )


def sample(
    error_code: str,
    status: int,
    message: str,
    *,
    time_ns: int,
    param: str | None = None,
    tenant: str | None = None,
    route: str = "",
    request_id: str | None = None,
    correlation: str | None = None,
    secret: str | None = None,
) -> Refusal:
    """Return a refusal whose texts are cut; `secret`, the request's own key, is removed from them."""

    def cut(text: str, most: int) -> str:
        if secret:
            text = text.replace(secret, "[key]")
        return text if len(text) <= most else f"{text[: most - 1]}…"

    def named(text: str | None) -> str | None:
        return None if text is None else cut(text, NAME_CHARS)

    return Refusal(
        time_ns=time_ns,
        code=error_code,
        status=status,
        tenant=tenant,
        route=cut(route, NAME_CHARS),
        message=cut(message, MESSAGE_CHARS),
        param=named(param),
        request_id=named(request_id),
        correlation=named(correlation),
    )
