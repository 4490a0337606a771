"""`Client`: the same calls for programs without an event loop.

The asynchronous client runs on an event loop in its own thread; a call hands its work over and waits. So it
can be used from several threads at once, Ctrl-C ends the waiting call and its request, and clients that were
not closed are closed when the program ends. docs/adr/0024-libraries.md says why this is not anyio's portal.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from dalsegno.client.answer import Answer, Chunk, Ranked
from dalsegno.client.asynchronous import PATIENCE_S, AsyncClient
from dalsegno.client.media import Audio, MediaItem, Medium
from dalsegno.client.request import Messages, RequestOptions
from dalsegno.client.stream import AsyncStream
from dalsegno.client.transport import Health
from shared.errors import ClientError
from shared.log.nats.credentials import Credentials

_T = TypeVar("_T")
_END_S: Final = 5.0
"""Seconds that the program's end waits for requests to be cancelled, at a server that may be gone."""


class _EventLoopThread:
    """An event loop in a thread, until `end`; it finishes with `on_end`.

    Work is passed as a function that creates its coroutine in the thread: so a Ctrl-C at any moment leaves no
    coroutine that is never awaited.
    """

    def __init__(self, on_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._is_ended = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._cleanups: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="dalsegno-client", daemon=True
        )
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._until_ended(started))

    async def _until_ended(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._stop.wait()
        for call in self._calls:
            call.cancel()
        if self._calls or self._cleanups:
            await asyncio.wait(self._calls | self._cleanups)
        await self._on_end()

    def call(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine in the thread and wait for it; an interrupted wait cancels it."""
        work = self._submit(make, self._calls)
        try:
            return work.result.result()
        except FutureCancelledError:
            raise ClientError("this client was closed during the call", code="closed") from None
        except BaseException:
            with suppress(RuntimeError):  # the loop, and with it the call, has ended
                self._loop.call_soon_threadsafe(work.cancel)
            raise

    def run_later(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a cleanup coroutine in the thread without waiting; only the loop's end waits for it.

        Raises:
            ClientError: the loop has ended.
        """
        self._submit(make, self._cleanups)

    def _submit(
        self, make: Callable[[], Coroutine[Any, Any, _T]], kept: set[asyncio.Task[Any]]
    ) -> "_Call[_T]":
        work = _Call(make, kept)
        with self._lock:
            if self._is_ended:
                raise ClientError("this client is closed", code="closed")
            self._loop.call_soon_threadsafe(work.begin)
        return work

    def end(self) -> None:
        """End the thread; a second call does nothing."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # the garbage collector may run there
            self._thread.join(_END_S)


class _Call(Generic[_T]):
    """One coroutine on its way through the thread. All but `result` belongs to the thread."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, _T]], kept: set[asyncio.Task[Any]]) -> None:
        self.result: Future[_T] = Future()
        self._make = make
        self._kept = kept
        self._task: asyncio.Task[_T] | None = None

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._make())
        self._kept.add(self._task)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[_T]) -> None:
        self._kept.discard(task)
        if task.cancelled():
            self.result.cancel()
        elif (error := task.exception()) is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(task.result())


class Stream:
    """The chunks of one answer, in order, each once; created by `Client.stream`.

    Read it to its end, or leave its `with`: an incomplete answer is cancelled then.
    """

    def __init__(self, client: "Client", loop: _EventLoopThread, stream: AsyncStream) -> None:
        self._client = client  # a stream keeps its client alive
        self._loop = loop
        self._stream = stream
        self._abandoned = weakref.finalize(self, _abandon, loop, stream)

    @property
    def answer(self) -> Answer:
        """The answer so far; complete once the stream has ended."""
        return self._stream.answer

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def resumed(self) -> int:
        """The number of interruptions after which the stream was resumed."""
        return self._stream.resumed

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Chunk:
        chunk = self._loop.call(lambda: _next(self._stream))
        if chunk is None:
            self._abandoned.detach()
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> Answer:
        """Read the rest; return the whole answer."""
        return self._loop.call(self._stream.read)

    def close(self) -> None:
        """Close the stream; the request is cancelled if the answer is not complete."""
        self._abandoned.detach()
        self._loop.call(self._stream.aclose)


async def _next(stream: AsyncStream) -> Chunk | None:
    """Return the next chunk, or None at the end, because `StopAsyncIteration` cannot leave a task."""
    return await anext(stream, None)


def _abandon(loop: _EventLoopThread, stream: AsyncStream) -> None:
    """Close a stream that was dropped before its end."""
    with suppress(ClientError):  # the client, and with it its streams, is closed
        loop.run_later(stream.aclose)


class Client:
    """A client of one deployment, with the calls of `AsyncClient`.

    with Client("http://127.0.0.1:8000") as client:
        print(client.generate("What does len do?").text)
        for chunk in client.stream("What does zip do?"):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        address: str | Sequence[str] = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        token: str | None = None,
        credentials: Credentials | None = None,
        prefix: str = "ds",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._client = AsyncClient(
            address,
            api_key=api_key,
            token=token,
            credentials=credentials,
            prefix=prefix,
            patience_s=patience_s,
        )
        self._loop = _EventLoopThread(self._client.aclose)
        self._ending = weakref.finalize(self, self._loop.end)

    def generate(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Answer:
        """Return the complete answer."""
        return self._loop.call(
            lambda: self._client.generate(text, messages=messages, request_id=request_id, **how)
        )

    def chat(
        self, messages: str | Messages, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> Answer:
        """Return the answer to a chat, or to one user message."""
        return self._loop.call(lambda: self._client.chat(messages, request_id=request_id, **how))

    def speech(self, text: str, *, request_id: str | None = None, **how: Unpack[RequestOptions]) -> Audio:
        """Return the speech that a model generates from a text; `voice` is one of the model's."""
        return self._loop.call(lambda: self._client.speech(text, request_id=request_id, **how))

    def generate_image(
        self,
        prompt: str,
        *,
        size: str | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Medium:
        """Return the image that a model draws: a file. `size` is `WIDTHxHEIGHT` in pixels."""
        return self._loop.call(
            lambda: self._client.generate_image(prompt, size=size, request_id=request_id, **how)
        )

    def edit_image(
        self,
        prompt: str,
        images: MediaItem,
        /,
        *,
        size: str | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Medium:
        """Return what a model makes of one image or of several, as `prompt` says."""
        return self._loop.call(
            lambda: self._client.edit_image(prompt, images, size=size, request_id=request_id, **how)
        )

    def generate_video(
        self,
        prompt: str,
        *,
        size: str | None = None,
        seconds: float | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Medium:
        """Return the video that a model makes: a file.

        `size` is `WIDTHxHEIGHT` in pixels, `seconds` the length; `images` is the one to begin with.
        """
        return self._loop.call(
            lambda: self._client.generate_video(
                prompt, size=size, seconds=seconds, request_id=request_id, **how
            )
        )

    def embed(
        self, text: str, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> list[float]:
        """Return the embedding of a text, as the checkpoint defines it."""
        return self._loop.call(lambda: self._client.embed(text, request_id=request_id, **how))

    def embed_all(
        self, texts: Sequence[str], /, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> list[list[float]]:
        """Return the embedding of each text, by a model that takes several texts in a request.

        `images` may be given beside them, or alone: their embeddings come after those of the texts.
        """
        return self._loop.call(lambda: self._client.embed_all(texts, request_id=request_id, **how))

    def score(
        self,
        queries: str | Sequence[str],
        texts: Sequence[str],
        /,
        *,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> list[float]:
        """Return the score of each text by a reranker, against one query or each against its own."""
        return self._loop.call(lambda: self._client.score(queries, texts, request_id=request_id, **how))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> list[Ranked]:
        """Return the documents by their relevance to a query, the most relevant first; `top_n` of them."""
        return self._loop.call(
            lambda: self._client.rerank(query, documents, top_n=top_n, request_id=request_id, **how)
        )

    def warm(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> int:
        """Compute a prefix that later requests share; return the number of its tokens now cached."""
        return self._loop.call(
            lambda: self._client.warm(text, messages=messages, request_id=request_id, **how)
        )

    def stream(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> Stream:
        """Return the answer as a stream. The request is sent when the stream is first read."""
        return Stream(
            self, self._loop, self._client.stream(text, messages=messages, request_id=request_id, **how)
        )

    def resume(
        self,
        request_id: str,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        after: int = -1,
        **how: Unpack[RequestOptions],
    ) -> Stream:
        """Return the rest of an earlier request's answer, after its chunk `after`."""
        return Stream(
            self, self._loop, self._client.resume(request_id, text, messages=messages, after=after, **how)
        )

    def cancel(self, request_id: str) -> None:
        """Cancel a request; one that has ended already is left unchanged."""
        self._loop.call(lambda: self._client.cancel(request_id))

    def health(self) -> Health:
        """Return the server's health."""
        return self._loop.call(self._client.health)

    def models(self) -> list[str]:
        """Return the names of the served models."""
        return self._loop.call(self._client.models)

    def close(self) -> None:
        """Close the connections; streams that still run end with an error."""
        self._ending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
