"""Realistic clients: they stream, and resume at another gateway when a connection breaks.

Most are written by hand on httpx alone, so that none of our code filters what they receive. Two are our own
client, over HTTP and over NATS, as a service would use it. A client chooses the id of its request, and
resumes
with `Last-Event-ID`. It records everything and judges nothing.
"""

import asyncio
import json
import re
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from dalsegno.client import AsyncClient, BusyError
from shared.errors import DalSegnoError
from tests.chaos.questions import Question
from tests.chaos.seen import Piece, Seen

PATIENCE_S: Final = 240.0
"""A client that has no answer after so long gives up: the request counts as lost. On a machine that does
other things, too, a worker may take a minute to load torch, and every worker may have to."""
LINGER_S: Final = 60.0
"""How long a gateway that misses its client keeps the request."""
_PAUSE_S: Final = 0.05
_PAUSE_AT_MOST_S: Final = 1.0
_INDEX: Final = re.compile(r"\d+")
_AGAIN: Final = frozenset({429, 503})
"""Statuses, also of errors within a stream, by which a server says "not now" or "not here"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """The entry points: the gateways, and NATS."""

    urls: Sequence[str]
    nats_url: str
    nats_token: str


async def ask(doors: Doors, question: Question, request_id: str, *, first: int = 0) -> Seen:
    """Send a request and read to the end, starting at the gateway `first`."""
    seen = Seen(request_id, question, moments_s=[time.monotonic()])
    try:
        async with asyncio.timeout(PATIENCE_S):
            if question.way == "nats":
                await _with_our_client(doors.nats_url, doors.nats_token, seen)
            elif question.way == "client":
                urls = [*doors.urls[first % len(doors.urls) :], *doors.urls[: first % len(doors.urls)]]
                await _with_our_client(",".join(urls), None, seen)
            else:
                await _over_http(doors, seen, first)
    except TimeoutError:
        seen.gave_up = f"no end within {PATIENCE_S:g} s"
    except DalSegnoError as error:
        seen.gave_up = f"{error.code}: {error.message}"
    return seen


async def _with_our_client(address: str, token: str | None, seen: Seen) -> None:
    """Send a request with our client; retry a request that was refused for lack of capacity."""
    while not seen.completions:
        try:
            await _one_stream(address, token, seen)
        except BusyError as error:
            if seen.pieces:
                raise
            seen.refusals.append((error.code, error.message))
            seen.resumed += 1
            await asyncio.sleep(_PAUSE_AT_MOST_S)


async def _one_stream(address: str, token: str | None, seen: Seen) -> None:
    async with AsyncClient(address, token=token, patience_s=PATIENCE_S) as client:
        stream = client.stream(request_id=seen.request_id, **seen.question.fields)
        async for chunk in stream:
            seen.take(Piece(index=chunk.index, text=chunk.text, token_ids=tuple(chunk.token_ids)))
        answer = stream.answer
        seen.resumed += stream.resumed
        assert answer.usage is not None
        seen.take(Piece(finish_reason=answer.finish_reason))
        seen.usages.append(
            {
                "prompt_tokens": answer.usage.prompt_tokens,
                "completion_tokens": answer.usage.completion_tokens,
                "total_tokens": answer.usage.total_tokens,
            }
        )
        seen.completions += 1


# ---- over HTTP -----------------------------------------------------------------------------------------


class _BrokenError(Exception):
    """The connection broke, or the server is busy: retry."""


async def _over_http(doors: Doors, seen: Seen, first: int) -> None:
    pause_s, gateway = 0.0, first
    while True:
        heard = len(seen.pieces)
        try:
            await _one_connection(doors.urls[gateway % len(doors.urls)], seen)
        except (_BrokenError, httpx.HTTPError):
            seen.resumed += 1
            gateway += 1
        else:
            return
        pause_s = 0.0 if len(seen.pieces) > heard else min(max(2 * pause_s, _PAUSE_S), _PAUSE_AT_MOST_S)
        await asyncio.sleep(pause_s)


async def _one_connection(url: str, seen: Seen) -> None:
    """Read on one connection, after what was received; until the end or the client's timeout."""
    question = seen.question
    body = {**question.fields, "request_id": seen.request_id}
    if question.leaves_after is None:
        body["linger_s"] = LINGER_S
    headers = {} if seen.position is None else {"last-event-id": seen.position}
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5.0)) as http,
        http.stream("POST", f"{url}{question.way}", json=body, headers=headers) as response,
    ):
        if response.status_code != 200:
            _refused(seen, response.status_code, json.loads(await response.aread()).get("error", {}))
            return
        if question.is_whole:
            _document(json.loads(await response.aread()), seen)
            return
        reads = _ndjson if question.way == "/generate" else _sse
        async for piece in reads(response, seen):
            seen.take(piece)
            if question.leaves_after is not None and len(seen.pieces) >= question.leaves_after:
                seen.left = True
                return
            if question.cancels_after is not None and len(seen.pieces) >= question.cancels_after:
                cancelled = await http.delete(f"{url}/v1/requests/{seen.request_id}")
                seen.is_cancelled = seen.is_cancelled or cancelled.status_code == 200


def _refused(seen: Seen, status: int, error: Mapping[str, Any]) -> None:
    seen.refusals.append((str(error.get("code")), str(error.get("message"))))
    if status in _AGAIN:
        raise _BrokenError
    seen.gave_up = f"{status} {error.get('code')}: {error.get('message')}"


def _document(told: Mapping[str, Any], seen: Seen) -> None:
    """OpenAI's documents: a piece for each choice, or for each embedding."""
    for one in told.get("choices") or told["data"]:
        reason = str(one.get("finish_reason", "stop"))
        # Calls are text in the log, which ended with `stop`.
        end = "stop" if reason == "tool_calls" else reason
        seen.take(Piece(choice=one["index"], text=_said(one), finish_reason=end))
    seen.usages.append(_comparable(told["usage"]))
    seen.completions += 1


def _said(one: Mapping[str, Any]) -> str:
    """The text of a choice; its calls without their ids, or an embedding as text."""
    if "embedding" in one:
        return json.dumps([round(number, 3) for number in one["embedding"]])
    if "message" not in one:
        return str(one["text"])
    calls = [call["function"] for call in one["message"].get("tool_calls") or []]
    return json.dumps(calls) if calls else str(one["message"]["content"])


async def _ndjson(response: httpx.Response, seen: Seen) -> AsyncGenerator[Piece, None]:
    """M*'s stream: a line is a chunk, the end, or an error."""
    async for line in _complete_lines(response):
        told = json.loads(line)
        metadata, data = told["metadata"], b64decode(told["data"])
        text, data = (data.decode(), b"") if told["modality"] == "text" else ("", data)
        if told["modality"] == "error":
            _refused(seen, metadata["status"], metadata)
            return
        if "finish_reason" in metadata:
            yield Piece(text=text, data=data, finish_reason=metadata["finish_reason"])
            seen.usages.append(metadata["usage"])
            seen.completions += 1
        else:
            listed = metadata.get("logprobs")
            seen.position = str(metadata["index"])
            yield Piece(
                index=metadata["index"],
                text=text,
                data=data,
                token_ids=tuple(metadata["token_ids"]),
                logprobs=None if listed is None else tuple(one["logprob"] for one in listed),
            )
    if not seen.completions:
        raise _BrokenError


async def _sse(response: httpx.Response, seen: Seen) -> AsyncGenerator[Piece, None]:
    """OpenAI's stream: server-sent events; an event whose id has a chunk's index belongs to that chunk."""
    position: str | None = None  # of the event that is being told; ours once it is told whole
    async for line in _complete_lines(response):
        name, _, value = line.partition(b": ")
        if name == b"id":
            position = value.decode()
        elif name == b"data" and value == b"[DONE]":
            seen.completions += 1
        elif name == b"data":
            event = json.loads(value)
            seen.position = position or seen.position
            if "error" in event:
                is_not_now = event["error"]["type"] == "service_unavailable_error"
                _refused(seen, 503 if is_not_now else 500, event["error"])
                return
            if event.get("usage"):
                seen.usages.append(_comparable(event["usage"]))
            for choice in event["choices"]:
                yield _piece(choice, _index_of(position, choice["index"]))
            position = None
    if not seen.completions:
        raise _BrokenError


def _index_of(position: str | None, choice: int) -> int | None:
    """The index of a choice's last chunk in a stream position; None if it has none."""
    parts = (position or "").split(",")
    found = _INDEX.match(parts[choice]) if choice < len(parts) else None
    return int(found[0]) if found is not None else None


def _piece(choice: Mapping[str, Any], index: int | None) -> Piece:
    text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return Piece(
        choice=choice["index"],
        index=index,
        text=text,
        logprobs=_logprobs(choice.get("logprobs")),
        finish_reason=choice["finish_reason"],
    )


def _logprobs(listed: Mapping[str, Any] | None) -> tuple[float, ...] | None:
    if listed is None:
        return None
    if "content" in listed:
        return tuple(one["logprob"] for one in listed["content"])
    return tuple(listed["token_logprobs"])


async def _complete_lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The complete lines; a line that a broken connection cuts off does not count."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.strip():
                yield line.rstrip(b"\r")


def _comparable(usage: dict[str, Any]) -> dict[str, Any]:
    """A usage without what depends on the cache, and so on the requests before."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
