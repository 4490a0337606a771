"""The NATS transport: publishes the request and reads the answer from the log, as a gateway does.

No process is in between: only workers and conductors may die, and the fold that sorts out their chunks
(`gateway.requests.relay.OutputFold`) hides that. The log's reader survives reconnects, so an answer does not
break off here; it waits.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Final

from dalsegno.client.answer import Chunk, End
from dalsegno.client.errors import ConflictError, UnreachableError, error_of
from dalsegno.client.request import ClientRequest
from dalsegno.client.transport import Health
from gateway.requests.liveness import Liveness
from gateway.requests.relay import Answered, AnswerItem, Failed, Relay, RequestForgottenError, decode_or_none
from gateway.requests.submission import encode_or_refuse
from shared.errors import DalSegnoError
from shared.events import (
    AnyEvent,
    MalformedEventError,
    OutputChunk,
    RequestCancel,
    RequestSubmitted,
    WorkerJoined,
    decode,
    encode,
    submission_digest,
)
from shared.ids import parse_request_id
from shared.log.nats import jetstream
from shared.log.nats.credentials import ANONYMOUS, Credentials
from shared.log.port import Log, LogUnavailableError, WrongLastSequenceError
from shared.media import jetstream as media_jetstream
from shared.media.store import MediaStore
from shared.subjects import Subjects

_CONNECT_S: Final = 10.0
_ACCEPT_S: Final = 10.0
"""Seconds that the log may take to ack a request."""
_LISTEN_S: Final = 1.2
"""Seconds to listen for heartbeats, which are sent twice a second."""
_WRITER: Final = "dalsegno-client"


class NatsTransport:
    """The log of one deployment; connected at its first use."""

    def __init__(
        self,
        url: str,
        *,
        credentials: Credentials = ANONYMOUS,
        prefix: str = "ds",
        log: Log | None = None,
        media: MediaStore | None = None,
    ) -> None:
        self._url = url
        self._credentials = credentials
        self._subjects = Subjects(prefix)
        self._log = log
        self._media = media
        self._connecting = asyncio.Lock()
        self._model: str | None = None

    async def items(self, request: ClientRequest, after: int) -> AsyncGenerator[Chunk | End, None]:
        log = await self._connected()
        relay = await self._relay_of(log, request, is_resumed=after >= 0)
        try:
            async with aclosing(relay.items()) as items:
                async for item in items:
                    found = _of_item(item)
                    if isinstance(found, End) or found.index > after or _is_new_advice(found, after):
                        yield found
        finally:
            if not relay.output.ended:
                with suppress(DalSegnoError):  # the log is gone
                    await self.cancel(request.request_id)

    async def cancel(self, request_id: str) -> None:
        log = await self._connected()
        cancel = RequestCancel(writer=_WRITER, request_id=request_id, reason="its client no longer wants it")
        await self._stored(log, self._subjects.control(parse_request_id(request_id)), encode(cancel), None)

    async def health(self) -> Health:
        log = await self._connected()
        models = await self._models_by_rank(log)
        liveness = Liveness(sorted(models) or [0])
        try:
            async with asyncio.timeout(_LISTEN_S), aclosing(log.listen(self._subjects.heartbeats())) as beats:
                async for subject, payload in beats:
                    liveness.receive(subject, payload, time.monotonic())
                    if not liveness.missing(time.monotonic(), log_answers=True):
                        break
        except TimeoutError:
            pass
        found = liveness.overview(time.monotonic(), log_answers=log.connected, is_draining=False)
        missing = tuple(str(one) for one in found["missing"])
        return Health(is_ready=not missing, status=str(found["state"]), missing=missing, details=found)

    async def models(self) -> list[str]:
        models = await self._models_by_rank(await self._connected())
        return list(dict.fromkeys(models.values()))

    async def close(self) -> None:
        if self._log is not None:
            await self._log.close()
        if self._media is not None:
            await self._media.close()

    # ---- requests -------------------------------------------------------------------------------------
    async def _connected(self) -> Log:
        async with self._connecting:
            if self._log is None:
                try:
                    self._log = await jetstream.connect(
                        self._url,
                        credentials=self._credentials,
                        subjects=self._subjects,
                        name=_WRITER,
                        timeout_s=_CONNECT_S,
                    )
                except LogUnavailableError as error:
                    raise UnreachableError(error.message) from error
            return self._log

    async def _relay_of(self, log: Log, request: ClientRequest, *, is_resumed: bool) -> Relay:
        """Store the request, unless it is stored already, and return a relay of its whole answer.

        A resumed request is never stored again.
        """
        event = RequestSubmitted(
            writer=_WRITER,
            request_id=request.request_id,
            model=request.model or await self._served(log),
            inputs=request.inputs,
            params=request.params,
            timeout_s=request.timeout_s,
            is_first=True,
        )
        relay = Relay(log, self._subjects, request.request_id)
        # Read before the request is stored: every epoch that applies to its events starts here or later.
        term = await log.last(self._subjects.epoch)
        first_seq = term.seq if term is not None else 1
        subject = self._subjects.request(request.request_id)
        seq = None
        if not is_resumed:
            await self._store_media(request)
            with suppress(WrongLastSequenceError):
                seq = await self._stored(log, subject, encode_or_refuse(event), 0)
        if seq is None:
            seq = await self._original(log, event)
            first_seq = max(1, (await log.state()).first_seq)
        relay.output.submission_seq = seq
        relay.reread(first_seq, epoch=0)
        return relay

    async def _store_media(self, request: ClientRequest) -> None:
        """Store the files of a request, which the log only names."""
        for file, medium in zip(request.files, request.inputs.files, strict=True):
            store = await self._media_store()
            await store.put(
                file.data,
                tenant=None,
                content_type=medium.content_type,
                name=file.name,
                digest=medium.digest,
            )

    async def _media_store(self) -> MediaStore:
        async with self._connecting:
            if self._media is None:
                try:
                    self._media = await media_jetstream.connect(
                        self._url,
                        credentials=self._credentials,
                        subjects=self._subjects,
                        name=_WRITER,
                        timeout_s=_CONNECT_S,
                    )
                except LogUnavailableError as error:
                    raise UnreachableError(error.message) from error
            return self._media

    async def _served(self, log: Log) -> str:
        if self._model is None:
            models = await self.models()
            if not models:
                raise UnreachableError(
                    f"no worker has been ready yet under the prefix {self._subjects.prefix!r}"
                )
            self._model = models[0]
        return self._model

    async def _stored(self, log: Log, subject: str, data: bytes, expected: int | None) -> int:
        try:
            async with asyncio.timeout(_ACCEPT_S):
                return await log.publish(subject, data, expected_last_seq=expected)
        except TimeoutError as error:
            raise UnreachableError(f"the log at {self._url} did not answer within {_ACCEPT_S:g} s") from error

    async def _original(self, log: Log, event: RequestSubmitted) -> int:
        """Return the position of the stored request with this id.

        Raises:
            ConflictError: it is another request.
            RequestExpiredError: it is no longer in the log.
        """
        subject = self._subjects.request(event.request_id or "")
        is_taken = False
        async with aclosing(log.history([subject])) as records:
            async for record in records:
                is_taken = True
                with suppress(MalformedEventError):
                    if _is_same(decode(record.data, "request"), event):
                        return record.seq
                    break  # the first readable submission owns the id
        if not is_taken:
            expired = RequestForgottenError(event.request_id or "")
            raise error_of(expired.status, expired.code, expired.message)
        raise ConflictError(
            f"request_id {event.request_id!r} is taken by another request: repeat it unchanged, or choose "
            "another id",
            code="request_id_conflict",
            status=409,
        )

    # ---- workers -------------------------------------------------------------------------------------
    async def _models_by_rank(self, log: Log) -> dict[int, str]:
        """Return the model of every rank that has joined, by the log."""
        models: dict[int, str] = {}
        async with aclosing(log.history([self._subjects.worker_any()])) as records:
            async for record in records:
                address = self._subjects.parse(record.subject)
                event = decode_or_none(record, address) if address is not None else None
                if isinstance(event, WorkerJoined):
                    models[event.rank] = event.model
        return models


def _is_same(original: AnyEvent, event: RequestSubmitted) -> bool:
    if not isinstance(original, RequestSubmitted):
        return False
    return submission_digest(original) == submission_digest(event)


def _of_item(item: AnswerItem) -> Chunk | End:
    match item:
        case OutputChunk():
            return _chunk(item)
        case Answered():
            return End(finish_reason=item.finish_reason, usage=item.usage)
        case Failed():
            failure = item.failure
            raise error_of(failure.status, failure.code, failure.message)


def _is_new_advice(chunk: Chunk, after: int) -> bool:
    """True for an advisory chunk that was not followed by a chunk that the client has."""
    return chunk.advisory and chunk.index >= after


def _chunk(found: OutputChunk) -> Chunk:
    metadata = dict(found.metadata)
    is_echo = bool(metadata.pop("echo", False))
    return Chunk(
        index=found.index,
        modality=found.modality,
        text=found.text,
        data=found.data or b"",
        token_ids=metadata.pop("token_ids", []) if is_echo else found.token_ids,
        logprobs=found.logprobs,
        is_echo=is_echo,
        metadata=metadata,
        advisory=found.advisory,
    )
