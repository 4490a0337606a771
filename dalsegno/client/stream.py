"""One answer as it comes, unbroken: what breaks on the way is taken up again behind the last chunk.

The request has an id that the client chose, so it can be asked again and is executed once. When the
connection is lost (a gateway died, a proxy gave up), the stream asks again under the same id behind the last
chunk it has, at first at once, then less and less often, until `patience_s` have gone by without any.
Refusals are not tried again; but for a server that says "not now" where it had taken the request already.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Final, Self

from dalsegno.client.answer import Answer, Chunk, End
from dalsegno.client.errors import BrokenError, BusyError, UnreachableError
from dalsegno.client.request import ClientRequest
from dalsegno.client.transport import ClientTransport
from shared.errors import DalSegnoError

_PAUSE_S: Final = 0.05
_PAUSE_AT_MOST_S: Final = 2.0


class AsyncStream:
    """The chunks of one answer, in order, each once; made by `AsyncClient.stream`.

    Read it to its end, or leave its `async with`: what is not complete by then is cancelled.

    Attributes:
        answer: what there is of the answer so far; complete once the stream has ended.
        resumed: how often it was taken up again.
    """

    def __init__(
        self, transport: ClientTransport, question: ClientRequest, *, after: int, patience_s: float
    ) -> None:
        self.answer = Answer(question.request_id)
        self.resumed = 0
        self._transport = transport
        self._question = question
        self._after = after
        self._patience_s = patience_s
        self._taken = False  # the server may have the request
        self._chunks = self._unbroken()

    @property
    def request_id(self) -> str:
        return self.answer.request_id

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go; the request is cancelled if the answer is not complete."""
        await self._chunks.aclose()

    async def read(self) -> Answer:
        """Wait for the rest; the whole answer."""
        async with self:
            async for _ in self:
                pass
        return self.answer

    async def _unbroken(self) -> AsyncGenerator[Chunk, None]:
        loop = asyncio.get_running_loop()
        heard_s, pause_s = loop.time(), 0.0
        while True:
            before = self._after
            try:
                async with aclosing(self._transport.items(self._question, self._after)) as items:
                    async for item in items:
                        self._taken = True
                        if isinstance(item, End):
                            self.answer.finish(item)
                            return
                        if self._take(item):
                            yield item
            except (BrokenError, BusyError, UnreachableError) as error:
                if self._after > before:
                    heard_s, pause_s = loop.time(), 0.0
                if not self._may_go_on(error) or loop.time() + pause_s > heard_s + self._patience_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _PAUSE_S), _PAUSE_AT_MOST_S)
            self.resumed += 1

    def _take(self, chunk: Chunk) -> bool:
        """Whether a chunk is the next; what is had already may come again."""
        if chunk.index <= self._after:
            return False
        if chunk.index != self._after + 1:
            message = f"the answer has a hole: expected chunk {self._after + 1}, found {chunk.index}"
            raise DalSegnoError(message, code="output_mismatch")
        self._after = chunk.index
        self.answer.take(chunk)
        return True

    def _may_go_on(self, error: DalSegnoError) -> bool:
        self._taken = self._taken or isinstance(error, BrokenError)
        return self._taken
