"""One answer as a stream that survives interruptions: it is resumed after the last received chunk.

The client chose the request's id, so the request can be repeated and is executed once. When the connection is
lost (a gateway died, a proxy timed out), the stream repeats the request from the last chunk on: first at
once, then at growing intervals, until `patience_s` have passed without a chunk. Refusals are not retried,
except "not now" from a server that had accepted the request before.
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
    """The chunks of one answer, in order, each once; created by `AsyncClient.stream`.

    Read it to its end, or leave its `async with`: an incomplete answer is cancelled then.

    Attributes:
        answer: the answer so far; complete once the stream has ended.
        resumed: the number of interruptions.
    """

    def __init__(
        self, transport: ClientTransport, request: ClientRequest, *, after: int, patience_s: float
    ) -> None:
        self.answer = Answer(request.request_id)
        self.resumed = 0
        self._transport = transport
        self._request = request
        self._after = after
        self._patience_s = patience_s
        self._taken = False  # the server may have the request
        self._chunks = self._resumed_chunks()

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
        """Close the stream; the request is cancelled if the answer is not complete."""
        await self._chunks.aclose()

    async def read(self) -> Answer:
        """Read the rest; return the whole answer."""
        async with self:
            async for _ in self:
                pass
        return self.answer

    async def _resumed_chunks(self) -> AsyncGenerator[Chunk, None]:
        loop = asyncio.get_running_loop()
        last_chunk_s, pause_s = loop.time(), 0.0
        while True:
            before = self._after
            try:
                async with aclosing(self._transport.items(self._request, self._after)) as items:
                    async for item in items:
                        self._taken = True
                        if isinstance(item, End):
                            self.answer.finish(item)
                            return
                        if self._take(item):
                            yield item
            except (BrokenError, BusyError, UnreachableError) as error:
                if self._after > before:
                    last_chunk_s, pause_s = loop.time(), 0.0
                if not self._may_resume(error) or loop.time() + pause_s > last_chunk_s + self._patience_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _PAUSE_S), _PAUSE_AT_MOST_S)
            self.resumed += 1

    def _take(self, chunk: Chunk) -> bool:
        """Append the next chunk; False for one that was received before. Advice is not appended."""
        if chunk.advisory:
            return True
        if chunk.index <= self._after:
            return False
        if chunk.index != self._after + 1:
            message = f"the answer has a hole: expected chunk {self._after + 1}, found {chunk.index}"
            raise DalSegnoError(message, code="output_mismatch")
        self._after = chunk.index
        self.answer.take(chunk)
        return True

    def _may_resume(self, error: DalSegnoError) -> bool:
        self._taken = self._taken or isinstance(error, BrokenError)
        return self._taken
