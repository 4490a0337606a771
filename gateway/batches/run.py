"""One running batch: its lines are asked for, and their results become files.

    the input file -> lines -> lanes -> results -> segments in the store -> two files -> batch.ended

A lane asks for one line at a time, within this process (`gateway.batches.line_request`). The id of a line's
request follows from the batch's id and the line's number. So a gateway that takes a batch over attaches to
requests that were submitted before it: no line is computed twice.

An answer that says "try again" (503, 429) is asked for again, and is no result.

Each event of the run is stored only behind the last one that was read. A run that finds another gateway's
claim there ends, and leaves its requests to that gateway.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final, Literal, TypeAlias

from starlette.types import ASGIApp

from gateway.batches.line_request import LineRequest, answer_of
from gateway.batches.lines import MAX_LINES, BatchLine, BrokenLineError, lines_of, parse_line
from gateway.batches.live import BatchBeat
from gateway.batches.results import (
    CANCELLED,
    EXPIRED,
    LineResult,
    SegmentResults,
    lines_of_segment,
    segment_of,
)
from gateway.batches.slots import LOW_PRIORITY, LineSlots
from gateway.batches.state import BatchState, digests_of
from gateway.media.file_objects import LINES_TYPE, RESULTS_TYPE
from gateway.requests import recorded_answer
from gateway.requests.parsed_request import Delivery
from gateway.requests.recorded_answer import recorded_request, status_of
from gateway.requests.service import Gateway
from gateway.requests.status import ENDED
from shared.errors import ClientError, DalSegnoError
from shared.events import (
    BatchChecked,
    BatchCreated,
    BatchEnded,
    BatchEvent,
    BatchProblem,
    SegmentStored,
    encode,
)
from shared.ids import RequestId
from shared.log.port import Log, WrongLastSequenceError
from shared.media.store import MediaCorruptError, MediaGoneError, gone
from shared.telemetry.log_fields import MAY_QUOTE

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_S: Final = (0.25, 10.0)
"""The first pause before a line is asked for again; each is twice the one before, up to the second."""
_RETRIED: Final = (429, 503)
_GRACE_S: Final = 60.0
"""The time after the batch's expiry in which a request that nobody cancelled fails on the log."""
_FILLED: Final = 0.75
"""The share of the log's size from which on no line is asked for. Clients are refused from nine tenths on."""
_ROOM_S: Final = 1.0
_LONGEST_S: Final = 604_800.0
"""The longest time limit of a request on the log."""
Status: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]


class _TakenOverError(Exception):
    """Another gateway runs the batch, or it has ended."""


class BatchRun:
    """The run of one batch at this gateway, whose events are stored by `log`.

    Attributes:
        state: of the batch, which the caller folds; `folded` is called after each of its events.
        is_new: no line of it can be on the log yet.
    """

    def __init__(
        self,
        gateway: Gateway,
        app: ASGIApp,
        log: Log,
        state: BatchState,
        slots: LineSlots,
        *,
        is_new: bool,
    ) -> None:
        assert state.created is not None, "a batch that runs was created"
        self.state = state
        self._gateway = gateway
        self._app = app
        self._log = log
        self._created: BatchCreated = state.created
        self._slots = slots
        self._is_new = is_new
        self._publishing = asyncio.Lock()
        self._news = asyncio.Event()
        self._stopped = asyncio.Event()
        self._lines: AsyncGenerator[BatchLine | LineResult, None] | None = None
        self._reading = asyncio.Lock()
        self._unreadable: MediaGoneError | MediaCorruptError | None = None
        self._open: dict[int, SegmentResults] = {}

    def folded(self) -> None:
        """Note that the state has changed."""
        self._news.set()
        if self.state.is_cancelled:
            self._stopped.set()

    def beat(self) -> BatchBeat:
        """The heartbeat of now."""
        running = [one for number, one in self._open.items() if number not in self.state.segments]
        return BatchBeat(
            owner=self._gateway.origin,
            completed=self.state.completed + sum(one.completed for one in running),
            failed=self.state.failed + sum(one.failed for one in running),
        )

    async def run(self) -> None:
        """Run the batch to its end, or until another gateway has it. What fails is tried again."""
        expiry = asyncio.get_running_loop().call_later(
            max(0.0, self._created.expires_s - time.time()), self._stopped.set
        )
        pauses = _pauses()
        try:
            while True:
                try:
                    async with self._place():
                        await self._run_once()
                except _TakenOverError:
                    return
                except DalSegnoError as error:
                    _LOGGER.warning("batch %s: %s; it is tried again", self.state.id, error.message)
                except Exception:
                    _LOGGER.exception("batch %s failed, and is tried again", self.state.id, extra=MAY_QUOTE)
                else:
                    return
                self._is_new = False
                await asyncio.sleep(next(pauses))
        finally:
            expiry.cancel()
            self._free()

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None, None]:
        """Wait for a place among the batches that run; one that only has to be ended needs none."""
        places = self._slots.batches_of(self._created.tenant)
        waiting = asyncio.ensure_future(places.acquire())
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            stopped.cancel()
            if waiting.done() and not waiting.cancelled():
                places.release()
            else:
                waiting.cancel()

    async def _run_once(self) -> None:
        self._free()
        self._unreadable = None
        self.folded()
        if self.state.ended is not None:  # by an event whose ack was lost
            raise _TakenOverError
        try:
            await self._gateway.media_store.keep(self._created.input, tenant=self._created.tenant)
            if self.state.lines is None:
                lines = await self._count_lines()
                if not 1 <= lines <= MAX_LINES:
                    await self._finish("failed", [_wrong_number(lines)])
                    return
                await self._publish(BatchChecked(id=self._event_id(), writer=self._origin, lines=lines))
            if self.state.has_partial_segment:  # an earlier run found no file, and this one found it again
                raise gone(self._created.input)
            await self._run_lines()
        except (MediaGoneError, MediaCorruptError) as error:
            for segment in list(self._open.values()):
                await self._store(segment)
            problem = BatchProblem(code=error.failure_code, message=f"input_file_id: {error.message}")
            await self._finish("failed", [problem])
        else:
            await self._finish(self._end)

    @property
    def _origin(self) -> str:
        return self._gateway.origin

    @property
    def _end(self) -> Status:
        """The status after the last line."""
        if self.state.is_cancelled:
            return "cancelled"
        return "expired" if any(one.expired for one in self.state.segments.values()) else "completed"

    def _free(self) -> None:
        for one in self._open.values():
            one.close()
        self._open.clear()

    # ---- lines ---------------------------------------------------------------------------------------
    async def _file_lines(self) -> AsyncGenerator[tuple[int, bytes | None], None]:
        created, limit = self._created, self._gateway.settings.max_body_bytes
        async with aclosing(self._gateway.media_store.read(created.input, tenant=created.tenant)) as chunks:
            async for found in lines_of(chunks, limit):
                yield found

    async def _count_lines(self) -> int:
        number = 0
        async with aclosing(self._file_lines()) as lines:
            async for number, _ in lines:
                if number > MAX_LINES:
                    break
        return number

    async def _unfinished(self) -> AsyncGenerator[BatchLine | LineResult, None]:
        """The lines of segments that are not stored; a broken one is its result."""
        seen: set[str] = set()
        limit = self._gateway.settings.max_body_bytes
        async with aclosing(self._file_lines()) as lines:
            async for number, data in lines:
                try:
                    found: BatchLine | LineResult = parse_line(
                        number, data, self._created.endpoint, seen, limit
                    )
                except BrokenLineError as error:
                    found = LineResult(
                        number=number,
                        custom_id=error.custom_id,
                        request_id=self._request_id(number),
                        code=error.failure_code,
                        message=error.message,
                    )
                if segment_of(number) not in self.state.segments:
                    yield found

    async def _run_lines(self) -> None:
        """Run the lines that have no stored result.

        Raises:
            MediaGoneError, MediaCorruptError: the file ends early. The lines before have their results.
        """
        async with aclosing(self._unfinished()) as lines:
            self._lines = lines
            try:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self._gateway.settings.batch_lines):
                        tasks.create_task(self._run_lane(tasks), name=f"batch {self.state.id}")
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from group
        if self._unreadable is not None:
            raise self._unreadable

    async def _run_lane(self, tasks: asyncio.TaskGroup) -> None:
        while (line := await self._next_line()) is not None:
            if isinstance(line, LineResult):
                await self._record(line)
            elif await self._is_running(line):
                # Since before this run: it has its priority, and needs no lane.
                tasks.create_task(self._run_line(line), name=f"batch {self.state.id}")
            else:
                await self._run_line(line)
            await asyncio.sleep(0)  # lines that are not asked for wait for nothing else

    async def _run_line(self, line: BatchLine) -> None:
        await self._record(await self._result_of(line))

    async def _record(self, result: LineResult) -> None:
        segment = self._segment(segment_of(result.number))
        segment.add(result)
        if segment.is_complete:
            await self._store(segment)

    async def _is_running(self, line: BatchLine) -> bool:
        status = await self._recorded(self._request_id(line.number))
        return status is not None and status not in ENDED

    async def _recorded(self, request_id: RequestId) -> str | None:
        """The status of a line's request that an earlier run submitted; None if there is none."""
        if self._is_new:
            return None
        part = await status_of(self._gateway, request_id)
        return None if part.event is None else part.status

    async def _next_line(self) -> BatchLine | LineResult | None:
        assert self._lines is not None, "the lines are open while lanes run"
        async with self._reading:
            try:
                return await anext(self._lines, None)
            except (MediaGoneError, MediaCorruptError) as error:
                self._unreadable = error  # the lines that run get their answers
                return None

    def _request_id(self, line: int, attempt: int = 1) -> RequestId:
        again = f"-r{attempt}" if attempt > 1 else ""
        return RequestId(f"{self.state.id}-{line}{again}")

    async def _result_of(self, line: BatchLine) -> LineResult:
        attempt, pauses = 1, _pauses()
        while True:
            request_id = self._request_id(line.number, attempt)
            answer = await self._answer_of(line, request_id)
            if answer is None:
                break
            status, body = answer
            if status not in _RETRIED:
                return LineResult(
                    number=line.number,
                    custom_id=line.custom_id,
                    request_id=request_id,
                    status=status,
                    body=body,
                )
            if self._stopped.is_set():
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), next(pauses))
            attempt += await self._has_ended(request_id)
        code, end = (CANCELLED, "was cancelled") if self.state.is_cancelled else (EXPIRED, "expired")
        return LineResult(
            number=line.number,
            custom_id=line.custom_id,
            request_id=self._request_id(line.number, attempt),
            code=code,
            message=f"the batch {end} before this line had an answer",
        )

    async def _answer_of(self, line: BatchLine, request_id: RequestId) -> tuple[int, bytes] | None:
        """The answer to a line; None if the batch was stopped before, and the line's request with it."""
        recorded = await self._recorded(request_id)
        if recorded in ENDED:  # an answer that exists is given, also after the batch was stopped
            return await self._ask(line, request_id, LOW_PRIORITY, asyncio.Event())
        if recorded is not None:
            return await self._ask(line, request_id, LOW_PRIORITY, self._stopped)
        await self._room()
        async with self._slots.taken(
            line.requests, may_be_usual=not line.has_low_priority, tenant=self._created.tenant
        ) as priority:
            if self._stopped.is_set():
                return None
            return await self._ask(line, request_id, priority, self._stopped)

    async def _room(self) -> None:
        """Wait while the log is so full that batches would take the last room from other requests."""
        while not self._stopped.is_set() and self._gateway.connection.room.share > _FILLED:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _ROOM_S)

    async def _ask(
        self, line: BatchLine, request_id: RequestId, priority: int, gone: asyncio.Event
    ) -> tuple[int, bytes] | None:
        """Ask for a line; None if `gone` was set before the answer, and the line's request was cancelled."""
        left_s = max(0.0, self._created.expires_s - time.time())
        request = LineRequest(
            app=self._app,
            path=self._created.endpoint,
            body=line.body,
            name=line.custom_id,
            tenant=self._created.tenant,
            delivery=Delivery(
                request_id=request_id, priority=priority, timeout_s=min(left_s + _GRACE_S, _LONGEST_S)
            ),
        )
        answer = await answer_of(request, gone)
        if answer is None:  # a client that leaves does not cancel what another gateway submitted
            with suppress(ClientError):
                recorded = await recorded_request(self._gateway, request_id)
                await recorded_answer.cancel(self._gateway, recorded)
        return answer

    async def _has_ended(self, request_id: RequestId) -> bool:
        """True if a request has ended on the log: asking for it again would repeat that end."""
        return (await status_of(self._gateway, request_id)).status in ENDED

    # ---- results -------------------------------------------------------------------------------------
    def _segment(self, number: int) -> SegmentResults:
        lines = self.state.lines
        assert lines is not None, "the lines are counted before they run"
        if number not in self._open:
            self._open[number] = SegmentResults(number, lines_of_segment(number, lines))
        return self._open[number]

    async def _store(self, segment: SegmentResults) -> None:
        """Store a segment's results, and then that they are stored."""
        await self._publish(
            SegmentStored(
                id=self._event_id(),
                writer=self._origin,
                segment=segment.segment,
                completed=segment.completed,
                failed=segment.failed,
                expired=segment.expired,
                output=await self._put_part(segment, is_error=False) if segment.completed else None,
                errors=await self._put_part(segment, is_error=True) if segment.failed else None,
                models=sorted(segment.models),
                usage=segment.usage,
            )
        )
        del self._open[segment.segment]
        segment.close()

    @property
    def _parts_owner(self) -> str:
        """The owner of segments' results in the media store: not the tenant, who would find them listed."""
        return f"batch {self.state.id}"

    async def _put_part(self, segment: SegmentResults, *, is_error: bool) -> str:
        async with aclosing(segment.part(is_error=is_error)) as part:
            stored = await self._gateway.media_store.put(
                part, tenant=self._parts_owner, content_type=LINES_TYPE
            )
        return stored.digest

    async def _finish(self, status: Status, problems: list[BatchProblem] | None = None) -> None:
        """Make the batch's files of those of its segments, and end it."""
        segments = list(self.state.segments.values())
        files = [digests_of(segments, is_error=is_error) for is_error in (False, True)]
        output, errors = [
            await self._put_file(parts, f"{self.state.id}_{name}.jsonl") if parts else None
            for parts, name in zip(files, ("output", "error"), strict=True)
        ]
        await self._publish(
            BatchEnded(
                id=self._event_id(),
                writer=self._origin,
                status=status,
                output=output,
                errors=errors,
                problems=problems or [],
            )
        )
        _LOGGER.info("batch %s: %s, %d lines", self.state.id, status, self.state.lines or 0)
        for digest in [*files[0], *files[1]]:
            await self._gateway.media_store.delete(digest, tenant=self._parts_owner)

    async def _put_file(self, parts: list[str], name: str) -> str:
        store = self._gateway.media_store

        async def content() -> AsyncGenerator[bytes, None]:
            for digest in parts:
                async with aclosing(store.read(digest, tenant=self._parts_owner)) as chunks:
                    async for chunk in chunks:
                        yield chunk

        async with aclosing(content()) as chunks:
            stored = await store.put(
                chunks, tenant=self._created.tenant, content_type=RESULTS_TYPE, name=name
            )
        return stored.digest

    # ---- events --------------------------------------------------------------------------------------
    def _event_id(self) -> str:
        return f"{self._origin}.{secrets.token_hex(8)}"

    async def _publish(self, event: BatchEvent) -> None:
        """Store an event, and wait until it is read.

        Raises:
            _TakenOverError: another gateway runs the batch, or it has ended.
        """
        state = self.state
        async with self._publishing:
            while event.id not in state.event_ids:
                if state.ended is not None or state.owner != self._origin:
                    raise _TakenOverError
                self._news.clear()
                seq = state.last_seq
                with suppress(WrongLastSequenceError):
                    subject = self._gateway.subjects.batch(state.id)
                    await self._log.publish(subject, encode(event), expected_last_seq=seq)
                while state.last_seq == seq:
                    await self._news.wait()
                    self._news.clear()


def _pauses() -> Generator[float, None, None]:
    pause, longest = _RETRY_S
    while True:
        yield pause
        pause = min(2 * pause, longest)


def _wrong_number(lines: int) -> BatchProblem:
    if not lines:
        return BatchProblem(code="empty_file", message="input_file_id: expected a line, found none")
    return BatchProblem(
        code="too_many_lines",
        message=f"input_file_id: expected at most {MAX_LINES} lines, found more; make several batches",
    )
