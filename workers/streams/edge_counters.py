"""Running totals of a worker's events to and from other ranks (`shared.meters.EdgeMeters`)."""

from dataclasses import dataclass


@dataclass(slots=True)
class EdgeCounters:
    """Totals since the process started.

    Attributes:
        sent, received: events to and from other ranks.
        items: stream items produced on this rank; `chunks`, stream chunks consumed here.
    """

    sent: int = 0
    received: int = 0
    items: int = 0
    chunks: int = 0
