"""`Client`: the same calls for programs without an event loop.

The asynchronous client runs on an event loop of its own in a thread of its own; a call hands it work
and waits. So it may be used from several threads at once, Ctrl-C ends the call that waits and with it the
request, and what was not closed is closed when the program ends.
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

from dalsegno.client.answer import Answer, Chunk
from dalsegno.client.asynchronous import PATIENCE_S, AsyncClient
from dalsegno.client.media import Audio
from dalsegno.client.request import Messages, RequestOptions
from dalsegno.client.stream import AsyncStream
from dalsegno.client.transport import Health
from shared.errors import ClientError
from shared.log.nats.credentials import Credentials

_T = TypeVar("_T")
_END_S: Final = 5.0
"""RequestOptions long a program's end waits for requests to be cancelled, at a server that may be gone."""


class _EventLoopThread:
    """An event loop in a thread, until `end`; `on_end` is the last it does.

    Work comes as a function that makes its coroutine, which is called in the thread: so a Ctrl-C at any
    moment leaves no coroutine behind that nobody awaits.
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
        """Run a coroutine there and wait for it; whoever stops waiting cancels it."""
        work = self._submit(make, self._calls)
        try:
            return work.result.result()
        except FutureCancelledError:
            raise ClientError("this client was closed meanwhile", code="closed") from None
        except BaseException:
            with suppress(RuntimeError):  # the loop has ended, and the call with it
                self._loop.call_soon_threadsafe(work.cancel)
            raise

    def run_later(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine there that lets go of something; nobody waits for it but the loop's end.

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
        """End the thread; ending it twice is nothing."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # which may be where garbage is collected
            self._thread.join(_END_S)


class _Call(Generic[_T]):
    """One coroutine on its way through the thread. But for `result`, it is the thread's own."""

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
    """The chunks of one answer, in order, each once; made by `Client.stream`.

    Read it to its end, or leave its `with`: what is not complete by then is cancelled.
    """

    def __init__(self, client: "Client", loop: _EventLoopThread, stream: AsyncStream) -> None:
        self._client = client  # which lives as long as its streams
        self._loop = loop
        self._stream = stream
        self._abandoned = weakref.finalize(self, _abandon, loop, stream)

    @property
    def answer(self) -> Answer:
        """What there is of the answer so far; complete once the stream has ended."""
        return self._stream.answer

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def resumed(self) -> int:
        """RequestOptions often the stream broke and was taken up again."""
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
        """Wait for the rest; the whole answer."""
        return self._loop.call(self._stream.read)

    def close(self) -> None:
        """Let go; the request is cancelled if the answer is not complete."""
        self._abandoned.detach()
        self._loop.call(self._stream.aclose)


async def _next(stream: AsyncStream) -> Chunk | None:
    """The next chunk; None at the end, for `StopAsyncIteration` cannot leave a task."""
    return await anext(stream, None)


def _abandon(loop: _EventLoopThread, stream: AsyncStream) -> None:
    """A stream that was dropped on the way is closed as if its `with` had been left."""
    with suppress(ClientError):  # the client is closed, and its streams with it
        loop.run_later(stream.aclose)


class Client:
    """A client of one deployment; see `AsyncClient`, whose calls these are.

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
        """The answer, once it is complete."""
        return self._loop.call(
            lambda: self._client.generate(text, messages=messages, request_id=request_id, **how)
        )

    def chat(
        self, messages: str | Messages, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> Answer:
        """The answer to a chat, or to one message of it."""
        return self._loop.call(lambda: self._client.chat(messages, request_id=request_id, **how))

    def speech(self, text: str, *, request_id: str | None = None, **how: Unpack[RequestOptions]) -> Audio:
        """What a model that speaks makes of a text, whole; `voice` is one of the model's."""
        return self._loop.call(lambda: self._client.speech(text, request_id=request_id, **how))

    def embed(
        self, text: str, *, request_id: str | None = None, **how: Unpack[RequestOptions]
    ) -> list[float]:
        """The embedding of a text, as the model's checkpoint makes it."""
        return self._loop.call(lambda: self._client.embed(text, request_id=request_id, **how))

    def warm(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        **how: Unpack[RequestOptions],
    ) -> int:
        """Have a beginning computed that requests will have in common; so many of its tokens are kept now."""
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
        """The answer as it comes. Nothing is asked before it is read."""
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
        """The answer to a request that was asked before, behind its chunk `after`."""
        return Stream(
            self, self._loop, self._client.resume(request_id, text, messages=messages, after=after, **how)
        )

    def cancel(self, request_id: str) -> None:
        """Have a request end; one that has ended already stays as it is."""
        self._loop.call(lambda: self._client.cancel(request_id))

    def health(self) -> Health:
        """RequestOptions the server is."""
        return self._loop.call(self._client.health)

    def models(self) -> list[str]:
        """The names of the models that are served."""
        return self._loop.call(self._client.models)

    def close(self) -> None:
        """Let go of the connections; streams that still run end with an error."""
        self._ending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
