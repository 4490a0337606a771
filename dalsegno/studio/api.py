"""The studio's data as JSON. Only `POST /api/bundles` changes anything, in memory.

GET  /api/sources                             the log and the bundles
GET  /api/requests?of=&before=&...            a page of the list; the filters of `dalsegno log`
GET  /api/live                                server-sent events: which requests have new records
GET  /api/request?source=&id=                 one request: lanes, critical path, output
GET  /api/events?source=&id=&start=&kind=&text=   a page of its events
GET  /api/event?source=&id=&seq=              one event
GET  /api/state?source=&id=&place=            the state after a record
GET  /api/changes?source=&id=&name=           every change of one value of the state
GET  /api/decisions?source=&id=               recorded decisions beside repeated ones
GET  /api/compare?source=&id=&source2=&id2=   two requests beside one another
GET  /api/range?source=                       the first and the last position of a recording
GET  /api/cluster?source=&at=                 ranks and open requests at a position
GET  /api/settings?source=                    the settings that can be changed, with recorded values
GET  /api/what-if?source=&set=&level=&last=   what other settings would have done; `set` has one per line
GET  /api/alternatives?source=&seq=           the ranks and the queue that an admission was chosen from
GET  /api/fork?source=&id=&seq=&set=           a changed version of a request; `set` has one change per line
POST /api/fork?source=&id=&seq=&set=           the same, submitted to the running deployment (--allow-ask)
GET  /api/medium?source=&id=&number=          a medium of the answer
POST /api/bundles                             a bundle's bytes; it is kept in memory until the end
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

import click
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from dalsegno.history import filter_options
from dalsegno.history.request_filter import RequestFilter
from dalsegno.studio import what_if_view
from dalsegno.studio.asking import Asker, Fork, fork_of
from dalsegno.studio.comparison import comparison
from dalsegno.studio.export import row_of
from dalsegno.studio.following import Follower
from dalsegno.studio.recordings import LOG, Shelf
from dalsegno.studio.study import Study
from shared.errors import ClientError, DalSegnoError

PAGE: Final = 500
"""Requests in one answer."""
MAX_BUNDLE_BYTES: Final = 1 << 30
_IN_MEMORY_BYTES: Final = 1 << 24
_FILTERS: Final = (
    "outcome", "code", "tenant", "model", "rank", "since", "until", "slower-than", "faster-than", "text",
    "not",
)  # fmt: skip
"""The options of `dalsegno log` that choose requests."""

Answer = Callable[[Request], Awaitable[Response]]


@click.command(add_help_option=False)
@filter_options.of_requests
def _filters(**choice: Any) -> None:
    """Parse filters: never invoked."""


class Api:
    """The routes of the data.

    Args:
        shelf: the recordings.
        follower: tells which requests have new records; None without a running deployment.
        asker: submits forks; None if the studio may only read.
    """

    def __init__(self, shelf: Shelf, follower: Follower | None, asker: Asker | None = None) -> None:
        self._shelf = shelf
        self._follower = follower
        self._asker = asker
        self._asking = asyncio.Lock()

    @property
    def routes(self) -> list[BaseRoute]:
        """All routes."""
        answers: dict[str, Answer] = {
            "/api/sources": self._sources,
            "/api/requests": self._requests,
            "/api/live": self._live,
            "/api/request": self._of_study(lambda study, _: study.request()),
            "/api/events": self._of_study(_events),
            "/api/event": self._of_study(lambda study, query: study.event(_number(query, "seq"))),
            "/api/state": self._of_study(lambda study, query: study.state(_number(query, "place"))),
            "/api/changes": self._of_study(lambda study, query: study.changes(_text(query, "name"))),
            "/api/decisions": self._of_study(lambda study, _: study.decisions()),
            "/api/medium": self._medium,
            "/api/compare": self._compare,
            "/api/range": self._range,
            "/api/cluster": self._cluster,
            "/api/settings": self._settings,
            "/api/what-if": self._what_if,
            "/api/alternatives": self._alternatives,
            "/api/fork": self._show_fork,
        }
        return [
            *(Route(path, _guarded(answer), methods=["GET"]) for path, answer in answers.items()),
            Route("/api/bundles", _guarded(self._add_bundle), methods=["POST"]),
            Route("/api/fork", _guarded(self._ask_fork), methods=["POST"]),
        ]

    # ---- lists ---------------------------------------------------------------------------------------
    async def _sources(self, request: Request) -> Response:
        log = self._shelf.log
        return _json(
            {
                "log": None if log is None else {"id": LOG, "name": log.name, "live": log.is_live},
                "bundles": [{"id": one.id, "name": one.name} for one in self._shelf.bundles.values()],
                "can_ask": self._asker is not None,
            }
        )

    async def _requests(self, request: Request) -> Response:
        query = request.query_params
        wanted = filter_of(query.multi_items())
        before = query.get("before")
        if before is not None:
            wanted = _until(wanted, _number(query, "before"))
        rows = await self._shelf.rows(wanted, PAGE + 1, query.get("of") or self._first_shelf())
        shown = rows[:PAGE]
        return _json(
            {
                "rows": [row_of(row) for row in shown],
                "next": str(shown[-1].summary.start_ns) if len(rows) > PAGE else None,
            }
        )

    def _first_shelf(self) -> str:
        return LOG if self._shelf.log is not None else "bundles"

    async def _live(self, request: Request) -> Response:
        if self._follower is None:
            raise ClientError("no deployment writes to what is open here: nothing will change")

        async def lines(follower: Follower) -> AsyncIterator[bytes]:
            async for news in follower.news():
                yield b"data: " + msgspec.json.encode(news) + b"\n\n"

        return StreamingResponse(lines(self._follower), media_type="text/event-stream")

    # ---- one request -----------------------------------------------------------------------------------
    async def _study(self, request: Request) -> Study:
        query = request.query_params
        return await self._shelf.find(_text(query, "source")).study(_text(query, "id"))

    def _of_study(self, compute: Callable[[Study, Any], Any]) -> Answer:
        async def answer(request: Request) -> Response:
            study = await self._study(request)
            return _json(await asyncio.to_thread(partial(compute, study, request.query_params)))

        return answer

    async def _compare(self, request: Request) -> Response:
        query = request.query_params
        other = await self._shelf.find(_text(query, "source2")).study(_text(query, "id2"))
        return _json(await asyncio.to_thread(comparison, await self._study(request), other))

    async def _range(self, request: Request) -> Response:
        first, last = await self._shelf.find(_text(request.query_params, "source")).extent()
        return _json({"first_seq": first, "last_seq": last})

    async def _cluster(self, request: Request) -> Response:
        query = request.query_params
        fold = self._shelf.find(_text(query, "source")).cluster
        return _json(await fold.at(_number(query, "at")))

    async def _settings(self, request: Request) -> Response:
        source = self._shelf.find(_text(request.query_params, "source"))
        return _json({"settings": what_if_view.settings_of(source.configs)})

    async def _what_if(self, request: Request) -> Response:
        query = request.query_params
        source = self._shelf.find(_text(query, "source"))
        level = query.get("level") or "decisions"
        if level not in ("decisions", "times"):
            raise ClientError(f"expected the level decisions or times, found {level[:40]!r}")
        changes = _lines(_text(query, "set"))
        last = max(_number(query, "last"), 1) if query.get("last") else None
        async with self._asking:  # each holds a whole recording in memory
            whole = await source.whole()
            return _json(await asyncio.to_thread(what_if_view.answered, whole, changes, level, last))  # type: ignore[arg-type]

    async def _alternatives(self, request: Request) -> Response:
        query = request.query_params
        source, seq = self._shelf.find(_text(query, "source")), _number(query, "seq")
        async with self._asking:
            whole = await source.whole()
            return _json(await asyncio.to_thread(what_if_view.alternatives_at, whole, seq))

    async def _show_fork(self, request: Request) -> Response:
        return _json((await self._fork(request)).plain)

    async def _ask_fork(self, request: Request) -> Response:
        if self._asker is None:
            raise ClientError("this studio only reads: start it with --allow-ask to submit requests")
        return _json({"request_id": await self._asker.ask(await self._fork(request))})

    async def _fork(self, request: Request) -> Fork:
        query, study = request.query_params, await self._study(request)
        seq = _number(query, "seq") if query.get("seq") else None
        return await asyncio.to_thread(
            fork_of, study.history, study.request_id, seq, _lines(query.get("set", ""))
        )

    async def _medium(self, request: Request) -> Response:
        study, number = await self._study(request), _number(request.query_params, "number")
        made = await asyncio.to_thread(lambda: study.made)
        data = made[number].data if number < len(made) else None
        if data is None:
            raise ClientError(f"the answer has no medium {number} that can be shown")
        return _in_part(request, data, made[number].content_type)

    # ---- bundles ---------------------------------------------------------------------------------------
    async def _add_bundle(self, request: Request) -> Response:
        name = unquote(request.headers.get("x-dalsegno-name", ""))[:200] or "dropped.bundle"
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as file:
            size = 0
            async for piece in request.stream():
                size += len(piece)
                if size > MAX_BUNDLE_BYTES:
                    raise ClientError(f"expected a bundle of at most {MAX_BUNDLE_BYTES:,} bytes, found more")
                file.write(piece)
            file.seek(0)
            found = await asyncio.to_thread(self._shelf.add, name, file)  # type: ignore[arg-type]
        return _json({"id": found.id, "name": found.name, "requests": found.history.requests})


# ---- filters -------------------------------------------------------------------------------------------


def filter_of(query: list[tuple[str, str]]) -> RequestFilter:
    """Return the filter of a list's address: the options of `dalsegno log`, without the dashes.

    Raises:
        ClientError: a value is not one of that option's.
    """
    arguments = [f"--{name}={value}" for name, value in query if name in _FILTERS and value]
    try:
        context = _filters.make_context("filter", arguments)
        return filter_options.filter_of(**context.params)
    except click.UsageError as error:
        raise ClientError(error.format_message()) from error


def _until(wanted: RequestFilter, until_ns: int) -> RequestFilter:
    return replace(wanted, until_ns=min(wanted.until_ns, until_ns))


def _events(study: Study, query: Any) -> Any:
    start = _number(query, "start") if "start" in query else 0
    return study.events(start, query.get("kind", ""), query.get("text", ""))


# ---- requests and answers --------------------------------------------------------------------------------


def _text(query: Any, name: str) -> str:
    value = query.get(name)
    if not value:
        raise ClientError(f"expected a value for {name!r} in the address, found none")
    return str(value)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _number(query: Any, name: str) -> int:
    value = _text(query, name)
    if not (value.isascii() and value.isdecimal() and len(value) < _MAX_DIGITS):
        raise ClientError(f"expected a number from 0 for {name!r}, found {value[:40]!r}")
    return int(value)


_MAX_DIGITS: Final = 20


def _guarded(answer: Answer) -> Answer:
    """Answer errors as JSON: a user's with 400, a missing log with 503."""

    async def guarded(request: Request) -> Response:
        try:
            return await answer(request)
        except ClientError as error:
            return _json({"error": error.message}, status=400)
        except DalSegnoError as error:
            return _json({"error": error.message}, status=503)
        except ClientDisconnect:
            return Response(status_code=400)

    return guarded


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _in_part(request: Request, data: bytes, content_type: str) -> Response:
    """A file, or the part of it that a player asks for."""
    headers = {"accept-ranges": "bytes"}
    asked = request.headers.get("range", "")
    unit, _, extent = asked.partition("=")
    first, _, last = extent.partition("-")
    if unit != "bytes" or not first.isdecimal() or int(first) >= len(data):
        return Response(data, media_type=content_type, headers=headers)
    begin = int(first)
    end = min(int(last), len(data) - 1) if last.isdecimal() else len(data) - 1
    headers["content-range"] = f"bytes {begin}-{end}/{len(data)}"
    return Response(data[begin : end + 1], status_code=206, media_type=content_type, headers=headers)
