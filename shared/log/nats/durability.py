"""What an acked event survives, found out before anybody relies on it. Pure.

    process   file storage, and what is acked is with the operating system: any process may be killed
    host      besides, the server syncs every write before it acks it (`sync_interval: always`)
    cluster   three servers keep the stream, and two of them have an event before it is acked

Storage and replicas are in what the stream tells anybody who may read it. Whether a server syncs is not: only
its configuration says so, or its monitoring (`/varz`). So it is checked by who provisions the stream, and
written into the stream's own metadata, where every role finds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import msgspec

from shared.log.nats.api import StreamInfo
from shared.log.port import Durability, DurabilityError

METADATA: Final = "dalsegno.durability"
REPLICAS: Final[Mapping[Durability, int]] = {"process": 1, "host": 1, "cluster": 3}
PROMISES: Final[Mapping[Durability, str]] = {
    "process": "what is acked survives the end of any process, not of the machine under the NATS server",
    "host": "what is acked survives the end of the machine under the NATS server",
    "cluster": "what is acked survives the loss of one of the cluster's servers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPolicy:
    """How the log of a deployment is to be kept.

    Attributes:
        durability: what an acked event is to survive.
        monitors: where the servers tell of themselves, `http://host:8222` each.
        syncs_always: who asks has configured the server, to sync each write.
        max_bytes: of the stream; None is no bound but the server's own, by default three quarters of the disk
            that was free when it started.
        max_age_s: what is older leaves the log.
    """

    durability: Durability = "process"
    monitors: Sequence[str] = ()
    syncs_always: bool = False
    max_bytes: int | None = None
    max_age_s: float = 7 * 24 * 3600.0


class Varz(msgspec.Struct, frozen=True):
    """What a server's monitoring tells, as far as it is read here."""

    class _JetStream(msgspec.Struct, frozen=True):
        class _Config(msgspec.Struct, frozen=True):
            sync_always: bool = False

        config: _Config | None = None

    server_name: str = ""
    jetstream: _JetStream = _JetStream()

    @property
    def syncs_always(self) -> bool:
        return self.jetstream.config is not None and self.jetstream.config.sync_always


def check_stream(asked: Durability, info: StreamInfo, where: str) -> Durability:
    """What a stream was found to give, when it is at least what is asked for.

    Raises:
        DurabilityError: it is less; says what was found, and what to do.
    """
    config = info.config
    if config.storage != "file":
        raise DurabilityError(f"{where}: expected file storage, found {config.storage}; {_ANEW}")
    if config.persist_mode == "async":
        raise DurabilityError(f"{where}: expected that acked is written, found persist_mode async; {_ANEW}")
    given = config.metadata.get(METADATA)
    found: Durability = next((one for one in get_args(Durability) if one == given), "process")
    if found == "cluster" and config.num_replicas < REPLICAS["cluster"]:
        found = "process"
    if asked not in {"process", found}:
        raise DurabilityError(
            f"{where}: nats.durability asks for {asked}, and the stream was made for {found}, with "
            f"{config.num_replicas} replica(s); run `dalsegno provision --durability {asked}`, "
            f"or ask for {found}"
        )
    return found


_ANEW: Final = "delete the stream, or take another prefix, and provision it again"


def check_group(info: StreamInfo, where: str) -> bool:
    """Whether three servers keep the stream, and have a leader: false while they are only finding together.

    Raises:
        DurabilityError: there are fewer.
    """
    group = info.cluster
    if group is None or info.config.num_replicas < REPLICAS["cluster"]:
        raise DurabilityError(
            f"{where}: nats.durability asks for cluster: expected a stream on 3 servers, found "
            f"{info.config.num_replicas}; {CLUSTER_NEEDS}"
        )
    return bool(group.leader) and len(group.replicas) + 1 >= REPLICAS["cluster"]


CLUSTER_NEEDS: Final = (
    "name a NATS cluster of at least 3 servers with JetStream, all of them running, or ask for "
    "nats.durability host or process"
)


def check_synced(keepers: Sequence[str], told: Sequence[Varz], where: str) -> None:
    """See that each of the servers that keep the stream says that it syncs every write.

    Args:
        keepers: their names.
        told: what the monitored servers say.
        where: the servers' addresses, for the message.

    Raises:
        DurabilityError: one does not, or says nothing.
    """
    if not told:
        raise DurabilityError(
            f"{where}: nats.durability asks for host, and no client of NATS can see whether a server syncs "
            "each write: name the servers' monitoring in nats.monitors (http://host:8222, the server's "
            "`http_port`), or ask for nats.durability process"
        )
    by_name = {one.server_name: one for one in told}
    for name in keepers:
        if name not in by_name:
            raise DurabilityError(
                f"{where}: nats.durability asks for host, and none of nats.monitors is the server {name!r}, "
                f"which keeps the stream (found {', '.join(sorted(by_name))}): name the monitoring of each"
            )
        if not by_name[name].syncs_always:
            raise DurabilityError(
                f"{where}: nats.durability asks for host, and the server {name!r} acks before it has synced: "
                "expected `sync_interval: always` in its jetstream block; set it, or ask for "
                "nats.durability process"
            )
