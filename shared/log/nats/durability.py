"""Checks that the stream provides the configured durability of acked events. Pure.

    process   file storage; acked events are with the operating system: any process may be killed
    host      in addition, the server syncs each write to disk before its ack (`sync_interval: always`)
    cluster   three servers store the stream, and two of them have an event before its ack

Every reader sees the stream's storage and its replicas. But only the server's configuration, or its
monitoring (`/varz`), shows whether it syncs. So provisioning checks that, and writes the result into the
stream's metadata, where every role finds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import msgspec

from shared.log.nats.api import StreamInfo
from shared.log.port import Durability, DurabilityError

MEDIA_AGE_FACTOR: Final = 1.25
"""The age limit of media, as a multiple of the log's: a medium that is used may be as old as the difference,
and outlives the event that names it (`shared.media.ages`)."""
METADATA: Final = "dalsegno.durability"
REPLICAS: Final[Mapping[Durability, int]] = {"process": 1, "host": 1, "cluster": 3}
PROMISES: Final[Mapping[Durability, str]] = {
    "process": "acked events survive the end of any process, but not of the NATS server's machine",
    "host": "acked events survive the end of the NATS server's machine",
    "cluster": "acked events survive the loss of one of the cluster's servers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPolicy:
    """The required durability and limits of a deployment's stream.

    Attributes:
        durability: the failure that an acked event must survive.
        monitors: the servers' monitoring addresses, `http://host:8222` each.
        syncs_always: the caller itself configured the server to sync each write.
        max_bytes: the maximum size; None is the server's own limit, by default three quarters of the disk
            space that was free when it started.
        max_age_s: the age at which events expire.
        max_consumers: the most readers that the server keeps for the stream.
        media_max_bytes: the maximum size of the stream of media; None: half of `max_bytes`.
    """

    durability: Durability = "process"
    monitors: Sequence[str] = ()
    syncs_always: bool = False
    max_bytes: int | None = None
    max_age_s: float = 7 * 24 * 3600.0
    max_consumers: int = 2048
    media_max_bytes: int | None = None

    @property
    def media_max_age_s(self) -> float:
        return self.max_age_s * MEDIA_AGE_FACTOR

    @property
    def media_limit(self) -> int | None:
        """The maximum size of the stream of media; None is the server's own limit."""
        if self.media_max_bytes is not None or self.max_bytes is None:
            return self.media_max_bytes
        return max(1, self.max_bytes // 2)


class Varz(msgspec.Struct, frozen=True):
    """The used part of a server's monitoring data."""

    class _JetStream(msgspec.Struct, frozen=True):
        class _Config(msgspec.Struct, frozen=True):
            sync_always: bool = False

        config: _Config | None = None

    server_name: str = ""
    jetstream: _JetStream = _JetStream()

    @property
    def syncs_always(self) -> bool:
        return self.jetstream.config is not None and self.jetstream.config.sync_always


def check_stream(required: Durability, info: StreamInfo, label: str) -> Durability:
    """Return the durability that a stream provides, if it satisfies the required one.

    Raises:
        DurabilityError: the stream provides less.
    """
    config = info.config
    if config.storage != "file":
        raise DurabilityError(f"{label}: expected file storage, found {config.storage}; {_RECREATE}")
    if config.persist_mode == "async":
        raise DurabilityError(f"{label}: expected acks after writes, found persist_mode async; {_RECREATE}")
    given = config.metadata.get(METADATA)
    found: Durability = next((one for one in get_args(Durability) if one == given), "process")
    if found == "cluster" and config.num_replicas < REPLICAS["cluster"]:
        found = "process"
    if required not in {"process", found}:
        raise DurabilityError(
            f"{label}: nats.durability is {required}, but the stream was provisioned for {found}, with "
            f"{config.num_replicas} replica(s); run `dalsegno provision --durability {required}`, "
            f"or set nats.durability to {found}"
        )
    return found


_RECREATE: Final = "delete the stream, or use another prefix, and provision it again"


def check_cluster(info: StreamInfo, label: str) -> bool:
    """Return whether three servers store the stream and have a leader; false while they elect one.

    Raises:
        DurabilityError: fewer servers store the stream.
    """
    group = info.cluster
    if group is None or info.config.num_replicas < REPLICAS["cluster"]:
        raise DurabilityError(
            f"{label}: nats.durability is cluster: expected a stream on 3 servers, found "
            f"{info.config.num_replicas}; {CLUSTER_NEEDS}"
        )
    return bool(group.leader) and len(group.replicas) + 1 >= REPLICAS["cluster"]


CLUSTER_NEEDS: Final = (
    "use a NATS cluster of at least 3 servers with JetStream, all of them running, or set "
    "nats.durability to host or process"
)


def check_synced(servers: Sequence[str], reports: Sequence[Varz], label: str) -> None:
    """Check that each server of the stream syncs every write.

    Args:
        servers: the names of the servers that store the stream.
        reports: the monitoring data of servers.
        label: the servers' addresses, for the message.

    Raises:
        DurabilityError: a server does not sync, or has no report.
    """
    if not reports:
        raise DurabilityError(
            f"{label}: nats.durability is host, and only the server's monitoring shows whether it syncs each "
            "write: list the servers' monitoring addresses in nats.monitors (http://host:8222, the server's "
            "`http_port`), or set nats.durability to process"
        )
    by_name = {report.server_name: report for report in reports}
    for name in servers:
        if name not in by_name:
            raise DurabilityError(
                f"{label}: nats.durability is host, and none of nats.monitors is the server {name!r}, which "
                f"stores the stream (found {', '.join(sorted(by_name))}): list the monitoring of each server"
            )
        if not by_name[name].syncs_always:
            raise DurabilityError(
                f"{label}: nats.durability is host, and the server {name!r} acks before it syncs: expected "
                "`sync_interval: always` in its jetstream block; set it, or set nats.durability to process"
            )
