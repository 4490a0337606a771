"""The NATS subjects of a deployment. `Subjects(prefix)` builds and parses them.

The **writer is a token of the subject**, so that NATS permissions can restrict each role to its own subjects.
Model names are in the payloads, because they contain dots.

    <prefix>.request.<request_id>                        any service: request.submitted
    <prefix>.control.<request_id>                        any service: request.cancel
    <prefix>.conductor.<kind>                            conductor: epoch, lost, sealed
    <prefix>.walk.<request_id>                           conductor: admitted, rejected, resumed, ended
    <prefix>.ready.<rank>.<request_id>                   conductor: node.ready, walk.stop
    <prefix>.done.<rank>.<request_id>                    worker: walk.completed, .progressed, ...
    <prefix>.edge.<to_rank>.<from_rank>.<request_id>     worker: node.fired, stream.*, tensors.released
    <prefix>.worker.<rank>                               worker: joined, leaving
    <prefix>.adapter.<name>                              gateway: adapter.loaded, adapter.unloaded
    <prefix>.refused.<gateway>                           gateway: requests.refused
    <prefix>.batch.<batch_id>                            gateway: batch.created, .claimed, .checked, ...
    <prefix>.conversation.<conversation_id>              gateway: conversation.created, .changed, .deleted
    <prefix>.output.<origin>.<request_id>.<writer>       worker: chunk (w<rank>); conductor: fence
    <prefix>.beat.<role>.<name>                          core NATS, no stream

Media are in a stream of their own; `owner` is the tenant's token (`shared.media.addresses`):

    <prefix>.media.<owner>.<digest>.<number>             any service: one piece of a medium's bytes
    <prefix>.media.<owner>.<digest>.head                 any service: the medium's size and type, stored last
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from shared.ids import Rank, RequestId

CONDUCTOR_WRITER: Final = "conductor"
_MEMBERSHIP: Final = ("epoch", "lost")
"""The conductor's kinds of events about processes."""
DEFAULT_ORIGIN: Final = "nats"
"""The `origin` of a request without one; its output is on `<prefix>.output.nats.<request_id>.*`."""


class Address(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parsed subject.

    Attributes:
        kind: the second token. It determines which of the other fields are set.
        rank: the rank of the orders or events; for an edge, the sending rank.
    """

    kind: str
    request_id: RequestId | None = None
    rank: Rank | None = None
    to_rank: Rank | None = None
    origin: str | None = None
    writer: str | None = None
    name: str | None = None

    @property
    def is_membership(self) -> bool:
        """True for events about processes: workers that join and leave, epochs, and lost workers."""
        return self.kind == "worker" or (self.kind == "conductor" and self.name in _MEMBERSHIP)


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one deployment; `prefix` is one token."""

    prefix: str = "ds"

    # ---- for publishers ----------------------------------------------------------------------------
    def request(self, request_id: str) -> str:
        return f"{self.prefix}.request.{request_id}"

    def control(self, request_id: str) -> str:
        return f"{self.prefix}.control.{request_id}"

    def conductor(self, kind: str) -> str:
        return f"{self.prefix}.conductor.{kind}"

    @property
    def epoch(self) -> str:
        return self.conductor("epoch")

    @property
    def lost(self) -> str:
        """The subject on which workers are declared lost."""
        return self.conductor("lost")

    @property
    def sealed(self) -> str:
        """The subject of seals. Only their verification reads it."""
        return self.conductor("sealed")

    def adapter(self, name: str) -> str:
        return f"{self.prefix}.adapter.{name}"

    def refused(self, gateway: str) -> str:
        """The subject of the requests that a gateway refused. Only people read it (`dalsegno log`)."""
        return f"{self.prefix}.refused.{gateway}"

    def batch(self, batch_id: str) -> str:
        """The subject of a batch, a file of requests. Only gateways read it (`gateway.batches`)."""
        return f"{self.prefix}.batch.{batch_id}"

    def conversation(self, conversation_id: str) -> str:
        """The subject of a conversation. Only gateways read it (`gateway.responses.conversations`)."""
        return f"{self.prefix}.conversation.{conversation_id}"

    def walk(self, request_id: str) -> str:
        return f"{self.prefix}.walk.{request_id}"

    def ready(self, rank: int | str, request_id: str) -> str:
        return f"{self.prefix}.ready.{rank}.{request_id}"

    def done(self, rank: int, request_id: str) -> str:
        return f"{self.prefix}.done.{rank}.{request_id}"

    def edge(self, to_rank: int | str, from_rank: int | str, request_id: str) -> str:
        return f"{self.prefix}.edge.{to_rank}.{from_rank}.{request_id}"

    def worker(self, rank: int) -> str:
        return f"{self.prefix}.worker.{rank}"

    def output(self, origin: str, request_id: str, writer: str) -> str:
        return f"{self.prefix}.output.{origin}.{request_id}.{writer}"

    def heartbeat(self, role: str, name: str) -> str:
        return f"{self.prefix}.beat.{role}.{name}"

    def medium(self, owner: str, digest: str, part: int | str) -> str:
        """The subject of a part of a medium: a piece's number, `head`, or `*`."""
        return f"{self.prefix}.media.{owner}.{digest}.{part}"

    # ---- for readers -------------------------------------------------------------------------------
    @property
    def stream(self) -> str:
        """The name of the stream with all subjects except heartbeats."""
        return f"{self.prefix.upper()}_LOG"

    @property
    def media_stream(self) -> str:
        """The name of the stream with the bytes of media."""
        return f"{self.prefix.upper()}_MEDIA"

    def media(self) -> str:
        """The subjects of the stream of media."""
        return f"{self.prefix}.media.>"

    def logged(self) -> list[str]:
        """The log's subjects."""
        kinds = (
            "request", "control", "conductor", "walk", "ready", "done", "edge", "worker", "adapter",
            "refused", "batch", "conversation", "output",
        )  # fmt: skip
        return [f"{self.prefix}.{kind}.>" for kind in kinds]

    def for_conductor(self) -> list[str]:
        """The subjects of facts and decisions; of the outputs only the conductor's own fences."""
        kinds = ("request", "control", "walk", "ready", "done", "worker", "adapter")
        own = [*self.conductor_facts(), self.output("*", "*", CONDUCTOR_WRITER)]
        return [f"{self.prefix}.{kind}.>" for kind in kinds] + own

    def for_worker(self, rank: int) -> list[str]:
        """The subjects that one rank reads: its orders, other ranks' events for it, joins, ends, epochs."""
        return [
            self.ready(rank, "*"),
            self.edge(rank, "*", "*"),
            self.walk("*"),
            self.worker_any(),
            *self.conductor_facts(),
        ]

    def for_gateway(self, origin: str) -> list[str]:
        """The subjects that one gateway reads: outputs, other gateways' readers, and its health's facts."""
        return [
            self.walk("*"),
            self.control("*"),
            self.output(origin, "*", "*"),
            *self.conductor_facts(),
            self.worker_any(),
            self.adapter("*"),
        ]

    def worker_any(self) -> str:
        return f"{self.prefix}.worker.*"

    def conductor_facts(self) -> list[str]:
        """The subjects of epochs and lost workers: what the conductor writes about no single request."""
        return [self.conductor(kind) for kind in _MEMBERSHIP]

    def heartbeats(self) -> str:
        return f"{self.prefix}.beat.>"

    def outputs_of(self, request_id: str, origin: str = "*") -> str:
        return self.output(origin, request_id, "*")

    def all_of(self, request_id: str) -> list[str]:
        """The subjects with all events of one request."""
        return [
            self.request(request_id),
            self.control(request_id),
            self.walk(request_id),
            self.ready("*", request_id),
            f"{self.prefix}.done.*.{request_id}",
            self.edge("*", "*", request_id),
            self.outputs_of(request_id),
        ]

    def replayed(self, request_id: str) -> list[str]:
        """The subjects that a replay of one request reads: its events, and the events they depend on."""
        return [*self.all_of(request_id), self.worker_any(), *self.conductor_facts()]

    # ---- parsing -----------------------------------------------------------------------------------
    def parse(self, subject: str) -> Address | None:
        """Return the parsed subject; None if it is not a subject of this deployment."""
        match subject.split("."):
            case [self.prefix, kind, *rest]:
                return _address(kind, rest)
            case _:
                return None


def _address(kind: str, rest: list[str]) -> Address | None:
    """Parse the tokens after the kind. The cases are ordered by frequency."""
    match len(rest):
        case 2 if kind in {"ready", "done"} and _is_rank(rest[0]):
            return Address(kind=kind, rank=Rank(int(rest[0])), request_id=RequestId(rest[1]))
        case 1 if kind in {"request", "control", "walk"}:
            return Address(kind=kind, request_id=RequestId(rest[0]))
        case 3 if kind == "output":
            return Address(kind=kind, origin=rest[0], request_id=RequestId(rest[1]), writer=rest[2])
        case 3 if kind == "edge" and _is_rank(rest[0]) and _is_rank(rest[1]):
            return Address(
                kind=kind, to_rank=Rank(int(rest[0])), rank=Rank(int(rest[1])), request_id=RequestId(rest[2])
            )
        case 1 if kind == "worker" and _is_rank(rest[0]):
            return Address(kind=kind, rank=Rank(int(rest[0])))
        case 1 if kind in {"conductor", "adapter", "refused", "batch", "conversation"}:
            return Address(kind=kind, name=rest[0])
        case _:
            return None


def _is_rank(text: str) -> bool:
    """Return whether `text` is a rank in its only valid spelling: `01` would be another subject than `1`."""
    return text.isdecimal() and text.isascii() and (text[0] != "0" or text == "0")


def worker_writer(rank: int) -> str:
    """Return the writer token of a worker's chunks."""
    return f"w{rank}"
