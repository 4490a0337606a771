"""The parts of JetStream's JSON API that this project uses. No I/O.

Requests go to `$JS.API.<verb>.<stream>` (NATS ADR-1, ADR-22).
"""

from datetime import UTC, datetime
from typing import Final

import msgspec

from shared.log.port import LogState, StoredRecord

INSUFFICIENT_RESOURCES: Final = 10023
NO_PEERS: Final = 10005
NOT_CLUSTERED: Final = 10074
MAX_CONSUMERS: Final = 10026
"""The stream has as many consumers as it may have."""
NO_MESSAGE: Final = 10037
INSUFFICIENT_STORAGE: Final = 10047
"""The limits of all streams add up to more than the server may store."""
STREAM_NAME_IN_USE: Final = 10058
STREAM_NOT_FOUND: Final = 10059
STORE_FAILED: Final = 10077
"""The stream has reached one of its limits."""
FULL: Final = frozenset({INSUFFICIENT_RESOURCES, STORE_FAILED})
WRONG_LAST_SEQUENCE: Final = 10071
WRONG_LAST_SEQUENCE_IN_FLIGHT: Final = 10164
"""Replicated streams only: another publish on the subject is in flight, neither stored nor refused yet."""


class ApiError(msgspec.Struct, frozen=True):
    """An error of the API."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, frozen=True):
    """The reply to a publish."""

    seq: int = 0
    error: ApiError | None = None


class LostRecords(msgspec.Struct, frozen=True):
    """Records that the server found lost when it read their files."""

    msgs: list[int] | None = None


class _StreamState(msgspec.Struct, frozen=True):
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    first_ts: str = ""
    consumer_count: int = 0
    lost: LostRecords | None = None
    subjects: dict[str, int] = {}


class ConsumerLimits(msgspec.Struct, frozen=True):
    """The limits of a stream for each of its consumers; 0 is none."""

    inactive_threshold: int = 0


class StreamConfig(msgspec.Struct, frozen=True):
    """The configuration of a stream. The server does not interpret `metadata`."""

    max_bytes: int = -1
    max_age: int = 0
    max_consumers: int = -1
    consumer_limits: ConsumerLimits = ConsumerLimits()
    num_replicas: int = 1
    storage: str = "file"
    persist_mode: str = ""
    metadata: dict[str, str] = {}


class ClusterPeer(msgspec.Struct, frozen=True):
    """A server that follows the stream's leader."""

    name: str
    current: bool = False
    offline: bool = False


class ClusterInfo(msgspec.Struct, frozen=True):
    """The servers that store a stream; `leader` is empty while there is none."""

    leader: str = ""
    replicas: list[ClusterPeer] = []


class StreamInfo(msgspec.Struct, frozen=True):
    """The reply to STREAM.INFO, .CREATE and .UPDATE; a single server has no `cluster`."""

    created: str = ""
    config: StreamConfig = StreamConfig()
    cluster: ClusterInfo | None = None
    state: _StreamState | None = None
    error: ApiError | None = None

    @property
    def lost(self) -> list[int]:
        """The positions of the records that the server knows to be lost."""
        lost = self.state.lost if self.state is not None else None
        return (lost.msgs or []) if lost is not None else []

    def log_state(self) -> LogState:
        assert self.state is not None
        return LogState(
            first_seq=self.state.first_seq,
            last_seq=self.state.last_seq,
            created_ns=parse_time_ns(self.created),
            messages=self.state.messages,
            bytes=self.state.bytes,
            max_bytes=self.config.max_bytes if self.config.max_bytes >= 0 else None,
            replicas=self.config.num_replicas,
            first_ns=parse_time_ns(self.state.first_ts) if self.state.messages else 0,
            consumers=self.state.consumer_count,
            max_consumers=self.config.max_consumers if self.config.max_consumers > 0 else None,
        )


class ConsumerInfo(msgspec.Struct, frozen=True):
    """The reply to CONSUMER.CREATE; `num_pending` records matched when the consumer was created."""

    num_pending: int = 0
    error: ApiError | None = None


class ConsumerConfig(msgspec.Struct, frozen=True):
    """The used part of a consumer's configuration; a pull consumer has no `deliver_subject`."""

    deliver_subject: str = ""


class ListedConsumer(msgspec.Struct, frozen=True):
    """A consumer in the reply to CONSUMER.LIST; `push_bound` is true while its deliveries are subscribed."""

    name: str
    created: str
    config: ConsumerConfig = ConsumerConfig()
    push_bound: bool = False


class ConsumerPage(msgspec.Struct, frozen=True):
    """The reply to CONSUMER.LIST: some of `total` consumers, from `offset` on."""

    total: int = 0
    offset: int = 0
    consumers: list[ListedConsumer] = []
    error: ApiError | None = None


class _StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    time: str
    data: bytes = b""  # base64 in the reply


class MessageReply(msgspec.Struct, frozen=True):
    """The reply to STREAM.MSG.GET."""

    message: _StoredMessage | None = None
    error: ApiError | None = None

    def record(self) -> StoredRecord:
        assert self.message is not None
        stored = self.message
        return StoredRecord(stored.seq, stored.subject, stored.data, parse_time_ns(stored.time))


def consumer_request(
    stream: str, name: str, deliver_subject: str, subjects: list[str], start_seq: int
) -> bytes:
    """Return the request for an ephemeral push consumer without acks and with flow control.

    It is NATS' ordered consumer, but the position is our cursor's.
    """
    return msgspec.json.encode(
        {
            "stream_name": stream,
            "config": {
                "name": name,
                "deliver_subject": deliver_subject,
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": start_seq,
                "filter_subjects": subjects,
                "ack_policy": "none",
                "max_deliver": 1,
                "flow_control": True,
                "idle_heartbeat": HEARTBEAT_NS,
                "inactive_threshold": 5_000_000_000,
                "mem_storage": True,
                "num_replicas": 1,
            },
        }
    )


MAX_INACTIVE_NS: Final = 300 * 1_000_000_000
"""The longest `inactive_threshold` of a consumer: the server deletes one without subscriber after this time.
NATS' own JavaScript client asks for five minutes."""

HEARTBEAT_NS: Final = 500_000_000
"""With the usual 5 s a reader resumed only 19 s after a restart of the server."""


def stream_request(
    name: str,
    subjects: list[str],
    *,
    max_bytes: int | None,
    max_age_s: float,
    max_consumers: int,
    replicas: int,
    metadata: dict[str, str],
) -> bytes:
    """Return the request for the stream. A full stream refuses new events; no event is ever deleted early."""
    return msgspec.json.encode(
        {
            "name": name,
            "subjects": subjects,
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "max_bytes": -1 if max_bytes is None else max_bytes,
            "max_age": int(max_age_s * 1e9),
            "max_msgs": -1,
            "max_msg_size": -1,
            # Never -1: since 2.15 the server replaces that by its `default_max_consumers`, 1000.
            "max_consumers": max_consumers,
            "consumer_limits": {"inactive_threshold": MAX_INACTIVE_NS},
            "num_replicas": replicas,
            "metadata": metadata,
            # The shortest window: deduplication would drop a valid copy of an event after a void one.
            "duplicate_window": 100_000_000,
            "allow_direct": True,
            "deny_delete": True,
            "deny_purge": True,
        }
    )


def media_stream_request(
    name: str, subject: str, *, max_bytes: int | None, max_age_s: float, replicas: int
) -> bytes:
    """Return the request for the stream of media. A full one refuses new media; a stored one is replaced.

    Nobody may read it by consumers or `DIRECT.GET`, by which stored bytes could be delivered to any subject.
    """
    return msgspec.json.encode(
        {
            "name": name,
            "subjects": [subject],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "max_bytes": -1 if max_bytes is None else max_bytes,
            "max_age": int(max_age_s * 1e9),
            "max_msgs": -1,
            "max_msg_size": -1,
            "max_msgs_per_subject": 1,
            "max_consumers": 1,  # 0 and -1 mean no limit
            "num_replicas": replicas,
            "duplicate_window": 100_000_000,
            "allow_direct": False,
            "deny_delete": True,
            "deny_purge": False,
        }
    )


class PurgeReply(msgspec.Struct, frozen=True):
    """The reply to STREAM.PURGE."""

    purged: int = 0
    error: ApiError | None = None


def parse_time_ns(text: str) -> int:
    """Return the nanoseconds since 1970 of an RFC 3339 time (`datetime` has only six digits)."""
    offset = max(text.find("Z"), text.rfind("+"), text.rfind("-", len("2026-01-01")))
    clock, zone = text[:offset], text[offset:].replace("Z", "+00:00")
    seconds, _, fraction = clock.partition(".")
    whole = datetime.fromisoformat(seconds + zone).astimezone(UTC)
    return int(whole.timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9])
