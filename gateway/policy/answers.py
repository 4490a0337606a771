"""The answer of `POST /policy`: actions as openpi's clients read them.

    {"actions": array (horizon, dimensions), "policy_timing": {"infer_ms": 81.3},
     "server_timing": {"infer_ms": 81.3, "prev_total_ms": 84.0}, "request_id": "act-..."}

The id is ours: `dalsegno log` and `dalsegno replay` take it.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.policy.packing import Array, pack
from gateway.requests.response import DocumentFormat
from shared.errors import BugError
from shared.events import OutputChunk, Usage
from shared.output_pieces import PieceAssembler

MEDIA_TYPE: Final = "application/msgpack"
ACTION: Final = "action"
"""The modality of a policy's output."""


@dataclass(slots=True)
class ActionsDocument(DocumentFormat):
    """The answer as one msgpack map.

    Attributes:
        begun_s: when the request was read, by `time.monotonic`.
        prev_total_ms: the time of the connection's previous message, with its sending; None for the first.
    """

    request_id: str
    begun_s: float
    prev_total_ms: float | None = None
    media_type: str = MEDIA_TYPE
    _pieces: PieceAssembler[OutputChunk] = field(default_factory=PieceAssembler)
    _actions: Array | None = None

    def chunk(self, choice: int, chunk: OutputChunk) -> bytes:
        if chunk.modality == ACTION and (whole := self._pieces.push(chunk.metadata, chunk)) is not None:
            data = b"".join(one.data or b"" for one in whole)
            self._actions = Array("<f4", tuple(chunk.metadata["shape"]), data)
        return b""

    def complete(self, usage: Usage) -> bytes:
        if self._actions is None:
            raise BugError("the request ended without actions: expected one tensor of the modality 'action'")
        infer = {"infer_ms": (time.monotonic() - self.begun_s) * 1000}
        previous: dict[str, Any] = {}
        if self.prev_total_ms is not None:
            previous["prev_total_ms"] = self.prev_total_ms
        return pack(
            {
                "actions": self._actions,
                "policy_timing": infer,
                "server_timing": {**infer, **previous},
                "request_id": self.request_id,
            }
        )
