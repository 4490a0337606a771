"""The media store on NATS JetStream: a stream of its own, `<PREFIX>_MEDIA`, beside the log's.

A piece is one message, `<prefix>.media.<owner>.<digest>.<number>`, and the last message on a subject counts.
It is read by `STREAM.MSG.GET`, whose reply is the server's JSON and so no event on any subject. No role may
read the stream by `DIRECT.GET` or by a consumer: both can deliver stored bytes, which any client wrote, to a
subject of the log (ADR 30).

The connection is another one than the log's, so that events do not wait behind uploads.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from shared.log.nats import api
from shared.log.nats.connection import NatsConnection
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.port import LogUnavailableError
from shared.media.pieced_store import PiecedMediaStore
from shared.media.pieces import HEAD, Stored
from shared.media.store import MediaStoreFullError, MediaStoreUnavailableError
from shared.subjects import Subjects

_Reply = TypeVar("_Reply", api.StreamInfo, api.MessageReply, api.PubAck, api.PurgeReply)

_PATIENCE_S: Final = 15.0
"""The time for which an operation is tried again while the server restarts."""
_RETRY_S: Final = 0.1
_TIMEOUT_S: Final = 10.0
"""The time that the server may take for one piece: others of this process are before it."""


async def connect(
    url: str,
    *,
    credentials: Credentials = ANONYMOUS,
    subjects: Subjects,
    name: str,
    timeout_s: float = 0.0,
    may_delete: bool = False,
    clock: Callable[[], int] = time.time_ns,
) -> PiecedMediaStore:
    """Connect to the media store of one deployment. Its stream may be created later.

    Args:
        url: the servers.
        credentials: shown to the server.
        subjects: the deployment's subjects.
        name: the label of the connection on the server.
        timeout_s: the time for which to retry if there is no server yet.
        may_delete: the role is permitted to delete media: gateways are.
        clock: returns the time in nanoseconds since 1970.

    Raises:
        LogUnavailableError: no server answers in time.
    """
    connection = NatsConnection(url)
    connection.label += ", for media"
    try:
        await connection.open(credentials=credentials, name=f"{name} media", timeout_s=timeout_s)
    except BaseException:
        await connection.close()
        raise
    return PiecedMediaStore(JetStreamPieces(connection, subjects, may_delete=may_delete), clock)


class JetStreamPieces:
    """Pieces in a stream (`shared.media.pieces.PieceStore`), over an open connection."""

    def __init__(self, connection: NatsConnection, subjects: Subjects, *, may_delete: bool) -> None:
        self._connection = connection
        self._subjects = subjects
        self._stream = subjects.media_stream
        self._may_delete = may_delete
        self._config: api.StreamConfig | None = None

    @property
    def max_age_ns(self) -> int | None:
        return (self._config.max_age or None) if self._config is not None else None

    async def put(self, owner: str, digest: str, part: int | str, data: bytes) -> None:
        await self._configured()
        ack = await self._call(self._subjects.medium(owner, digest, part), data, api.PubAck)
        if ack.error is None:
            return
        if ack.error.err_code in api.FULL:
            raise MediaStoreFullError(
                "the media store is full (media.store_bytes): try again when media have expired"
            )
        raise self._refused(ack.error)

    async def get(self, owner: str, digest: str, part: int | str) -> Stored | None:
        await self._configured()
        request = msgspec.json.encode({"last_by_subj": self._subjects.medium(owner, digest, part)})
        reply = await self._call(f"$JS.API.STREAM.MSG.GET.{self._stream}", request, api.MessageReply)
        if reply.error is None:
            record = reply.record()
            return Stored(record.data, record.time_ns)
        if reply.error.err_code == api.NO_MESSAGE:
            return None
        raise self._refused(reply.error)

    async def numbers(self, owner: str, digest: str) -> set[int]:
        subjects = await self._stored_subjects(self._subjects.medium(owner, digest, "*"))
        parts = [one.rpartition(".")[2] for one in subjects]
        return {int(part) for part in parts if part.isdecimal() and part.isascii()}

    async def digests(self, owner: str) -> set[str]:
        subjects = await self._stored_subjects(self._subjects.medium(owner, "*", HEAD))
        return {one.split(".")[-2] for one in subjects}

    async def _stored_subjects(self, pattern: str) -> set[str]:
        """Return the subjects that match, in pages: the server lists up to 100,000 at once."""
        found: set[str] = set()
        while True:
            request = msgspec.json.encode({"subjects_filter": pattern, "offset": len(found)})
            page = await self._info(request)
            listed = page.state.subjects if page.state is not None else {}
            if listed.keys() <= found:
                return found
            found |= listed.keys()

    async def remove(self, owner: str, digest: str) -> bool:
        if not self._may_delete:
            raise MediaStoreUnavailableError(
                "this role may not delete media: they expire, or a gateway deletes"
            )
        subject = f"$JS.API.STREAM.PURGE.{self._stream}"
        request = msgspec.json.encode({"filter": self._subjects.medium(owner, digest, "*")})
        reply = await self._call(subject, request, api.PurgeReply)
        if reply.error is not None:
            raise self._refused(reply.error)
        return reply.purged > 0

    async def close(self) -> None:
        await self._connection.close()

    # ---- the server ------------------------------------------------------------------------------------
    async def _configured(self) -> None:
        """Learn the limits of the stream, which may have been created after this process started."""
        if self._config is None:
            self._config = (await self._info(b"")).config

    async def _info(self, request: bytes) -> api.StreamInfo:
        info = await self._call(f"$JS.API.STREAM.INFO.{self._stream}", request, api.StreamInfo)
        if info.error is not None:
            raise self._refused(info.error)
        return info

    async def _call(self, subject: str, request: bytes, reply_type: type[_Reply]) -> _Reply:
        """Send a request; while the server restarts, send it again. All requests may be repeated."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while True:
            try:
                return await self._connection.call_api(subject, request, reply_type, timeout_s=_TIMEOUT_S)
            except LogUnavailableError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise MediaStoreUnavailableError(error.message) from error
            await asyncio.sleep(_RETRY_S)

    def _refused(self, error: api.ApiError) -> MediaStoreUnavailableError:
        advice = ""
        if error.err_code == api.STREAM_NOT_FOUND:
            advice = ": run `dalsegno provision` with this version, which creates it"
        return MediaStoreUnavailableError(
            f"{self._connection.label}: the stream {self._stream!r} cannot be used ({error.description})"
            f"{advice}"
        )
