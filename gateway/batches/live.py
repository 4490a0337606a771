"""Running batches as a gateway knows them beside the log: by the heartbeats of the gateways that run them.

A gateway sends one heartbeat a second for each batch that it runs, with the number of lines that are done.
The log has these numbers only for each stored segment.
"""

from dataclasses import dataclass, field
from typing import Final

import msgspec

SILENT_S: Final = 5.0
"""The time without a heartbeat after which another gateway takes a batch over."""


class BatchBeat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat.

    Attributes:
        owner: the gateway that runs the batch.
        completed: the number of lines with an answer; `failed` of those with an error.
    """

    owner: str
    completed: int
    failed: int


@dataclass(slots=True)
class LiveBatches:
    """The batches that run now, at any gateway.

    Attributes:
        beats: by batch, its last heartbeat.
    """

    beats: dict[str, BatchBeat] = field(default_factory=dict)
    _heard: dict[str, tuple[str, float]] = field(default_factory=dict)  # by batch: its owner, and when

    def receive(self, batch_id: str, payload: bytes, now_s: float) -> None:
        """Take a heartbeat; a malformed one is ignored."""
        try:
            beat = msgspec.msgpack.decode(payload, type=BatchBeat)
        except msgspec.MsgspecError:
            return
        self.beats[batch_id] = beat
        self._heard[batch_id] = beat.owner, now_s

    def is_silent(self, batch_id: str, owner: str, now_s: float) -> bool:
        """True if the owner of a batch has sent nothing for `SILENT_S`, since the first call about it."""
        heard_of, heard_s = self._heard.get(batch_id, ("", now_s))
        if heard_of != owner:
            self._heard[batch_id] = owner, now_s
            return False
        return now_s - heard_s > SILENT_S

    def begin_anew(self) -> None:
        """Count silence from now on: while the log was away, nobody could be heard."""
        self._heard.clear()

    def forget(self, batch_id: str) -> None:
        """Forget a batch that has ended."""
        self.beats.pop(batch_id, None)
        self._heard.pop(batch_id, None)
