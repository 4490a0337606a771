"""The stream that a KV node's sequence takes: its first items make the prompt, the others feed its steps.

    AttemptStreams ── first items ──> the prompt of the sequence
                   └─ next items  ──> EngineClient.feed, at most `AHEAD` beyond what the sequence has used

A sequence whose next item has not come is held in the engine; one whose stream is far ahead takes no items,
so that the stream fills up and holds its producer.
"""

import asyncio
from typing import Final

import numpy as np

from shared.walks import InputPort
from workers.data_plane.port import Array
from workers.generation.engine_client import EngineClient
from workers.generation.sequence_handle import SequenceHandle
from workers.streams.attempt_streams import AttemptStreams

AHEAD: Final = 64
"""The most items in the engine that a sequence has not used yet."""


class StreamFeed:
    """One stream, from the first chunk that a node call has taken.

    Attributes:
        ended: no further items follow.
    """

    def __init__(self, streams: AttemptStreams, stream: InputPort, first: Array) -> None:
        self.ended = not first.shape[0]
        self._streams = streams
        self._stream = stream
        self._waiting: list[Array] = [first] if first.shape[0] else []

    async def prompt_items(self, count: int) -> Array | None:
        """Wait for the first `count` items, or for the end of the stream before; None without any.

        Raises:
            LostTensor: items are gone.
            BugError: the stream has failed.
        """
        have = len(self._waiting)
        while have < count and not self.ended:
            items = await self._next(count - have)
            have += items.shape[0]
            self._waiting.append(items)
        if not count or not have:
            return None
        taken, self._waiting = self._waiting, []
        return _joined([one for one in taken if one.shape[0]])

    async def run(
        self, sequence: SequenceHandle, engine: EngineClient, until: "asyncio.Future[None]"
    ) -> None:
        """Feed the sequence until the stream ends, or `until` is done.

        Raises:
            LostTensor: items are gone.
            BugError: the stream has failed.
        """
        feeding = asyncio.ensure_future(self._feed(sequence, engine))
        try:
            await asyncio.wait({feeding, until}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
        finally:
            feeding.cancel()

    async def _feed(self, sequence: SequenceHandle, engine: EngineClient) -> None:
        fed = 0
        for items in self._waiting:
            engine.feed(sequence.key, items, ended=self.ended)
            fed += items.shape[0]
        self._waiting = []
        while not self.ended:
            while (room := AHEAD - (fed - sequence.generated.tokens)) <= 0:
                await sequence.next_token()
            items = await self._next(room)
            fed += items.shape[0]
            engine.feed(sequence.key, items if items.shape[0] else None, ended=self.ended)

    async def _next(self, limit: int) -> Array:
        if not self._streams.ready(self._stream):
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._streams.watch(self._stream, lambda: None if ready.done() else ready.set_result(None))
            await ready
        items, self.ended = await self._streams.next_items(self._stream, limit)
        return items


def _joined(items: list[Array]) -> Array:
    """Items of one dtype and shape as one array."""
    if len(items) == 1:
        return items[0]
    count = sum(one.shape[0] for one in items)
    data = np.concatenate([one.data for one in items])
    return Array(dtype=items[0].dtype, shape=(count, *items[0].shape[1:]), data=data)
