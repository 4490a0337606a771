"""The milestones of one request for its trace: queued, admitted, held, resumed.

The relay of a traced request hands its records to a `Milestones`. So nothing more is read from the log. The
times are the log's, except that of `queued`: the log's acknowledgement of a new request names no time, so
its arrival here counts, or the admission if that was stored earlier.

`preempted` is not among them: the gateway reads no reports of workers (`walk.completed`).
"""

from typing import Final

from shared.events import AnyEvent, OutputFence, RequestAdmitted, RequestResumed
from shared.telemetry.tracing import Span

REQUEST_ID: Final = "dalsegno.request_id"
_REASON: Final = "dalsegno.reason"


class Milestones:
    """The milestones of one request, in log order. Copies of a record are ignored."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._queued_ns: int | None = None
        self._admitted_ns: int | None = None
        self._others: dict[str, tuple[str, int, str]] = {}  # by event: name, time, reason

    def submitted(self, time_ns: int) -> None:
        """The request is in the log since `time_ns`, in nanoseconds since 1970."""
        self._queued_ns = time_ns

    def observe(self, event: AnyEvent, time_ns: int) -> None:
        """Note the milestone that an event is, if any; it was stored at `time_ns`."""
        match event:
            case RequestAdmitted():
                if self._admitted_ns is None:
                    self._admitted_ns = time_ns
                    self._others["admitted"] = ("admitted", time_ns, event.reason)
            case OutputFence() if not event.lives:
                self._others.setdefault(f"held {event.attempt}", ("held", time_ns, event.reason))
            case RequestResumed():
                self._others.setdefault(f"resumed {event.index}", ("resumed", time_ns, event.reason))
            case _:
                pass

    def write(self, span: Span) -> None:
        """Write the milestones as events of the span."""
        mark = {REQUEST_ID: self._request_id}
        if self._queued_ns is not None:
            queued_ns = self._queued_ns
            if self._admitted_ns is not None:
                queued_ns = min(queued_ns, self._admitted_ns)
            span.add_event("queued", mark, queued_ns)
        for name, time_ns, reason in self._others.values():
            span.add_event(name, {**mark, _REASON: reason}, time_ns)
