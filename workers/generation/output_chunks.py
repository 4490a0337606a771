"""Output chunks of one track: tokens and their text, or whole contents, are cut into `output.chunk` events.

    token ids ──> GeneratedText (decoder, stop strings) ──> Chunker (offsets, ids, totals) ──> the log
    content without tokens (an echo, media) ────────────────────┘
                              timing: the first text at once, then every 20 ms

`Chunker` is pure; its caller passes the time. `OutputStream` is the shell: it sets a timer on the event loop,
posts chunks, and waits for their acks. A chunk counts once the log has accepted it. While the log's backlog
is full, output waits in the chunker and leaves it later in larger chunks. When the chunker is `full`, the
producer waits: a sequence is held in the engine, any other node waits for room.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from shared import faults
from shared.errors import CapacityError, DalSegnoError
from shared.events import OutputChunk, OutputTotals, TokenLogprobs
from shared.transcript import Track

COALESCE_S: Final = 0.02
MAX_CHUNK_TOKENS: Final = 1024
"""The most tokens in a chunk: far below the log's largest payload, also when a long backlog is cut."""
MAX_CHUNK_LOGPROBS: Final = 4096
"""The most log probabilities in a chunk: about 200 kB."""
HELD_CHUNKS: Final = 2
"""The most tokens that may wait for the log, in full chunks."""
HELD_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of other content that may wait for the log before its producer has to wait."""
RETRY_S: Final = 0.25
_TIMER_GRAIN_S: Final = 0.001
"""A chunk due within this time is cut now. uvloop's clock counts whole milliseconds, and its timers fire up
to half a millisecond early. (Timers armed again for the rest fired twelve times per chunk; 2026-11.)"""


def tokens_per_chunk(top: int) -> int:
    """The most tokens in a chunk that lists each token's log probability and its `top` alternatives."""
    return min(MAX_CHUNK_TOKENS, MAX_CHUNK_LOGPROBS // (1 + top))


@dataclass(slots=True)
class OutputState:
    """The state of a track: its valid chunks, and the numbers of characters and tokens in them."""

    track: Track = field(default_factory=Track)
    text_offset: int = 0
    token_offset: int = 0

    def fold(self, chunk: OutputChunk) -> None:
        """Add a valid chunk."""
        self.text_offset += len(chunk.text)
        self.token_offset += len(chunk.token_ids)


class Chunker:
    """Cuts a track into chunks; pure. `peek` returns the next chunk, `take` confirms that it was posted.

    Contents without tokens leave before the tokens that wait.

    Attributes:
        metadata: what the track's first chunk with tokens says of the answer.
    """

    def __init__(
        self, state: OutputState, *, request_id: str, attempt: int, choice: int = 0, track: str = ""
    ) -> None:
        self._state = state
        self._id = ".".join([request_id, "out", str(attempt), *[track] * bool(track)])
        self._request_id = request_id
        self._attempt = attempt
        self._choice = choice
        self._track = track
        self._contents: deque[Mapping[str, Any]] = deque()
        self._contents_bytes = 0
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._joined: list[bool] = []  # by token: it is in one chunk with the next one
        self._logprobs: list[TokenLogprobs] = []  # one per token, or empty
        self._first_token_s: float | None = None  # when the first token arrived
        self._cut_s: float | None = None  # when the latest chunk was cut
        self._has_shown_text = False
        self.metadata: Mapping[str, Any] = {}

    @property
    def pending(self) -> bool:
        return bool(self._tokens or self._contents)

    @property
    def full(self) -> bool:
        """True while the producer has to wait because too much output waits for the log."""
        return self._contents_bytes > HELD_BYTES or len(self._tokens) > HELD_CHUNKS * self._max_tokens

    @property
    def totals(self) -> OutputTotals:
        return self._state.track.totals

    def add(self, token_id: int, text: str, now_s: float, logprobs: TokenLogprobs | None = None) -> None:
        """Add a token, and the text that it completed."""
        self.add_emission([token_id], [text], now_s)
        if logprobs is not None:
            self._logprobs.append(logprobs)

    def add_emission(self, token_ids: Sequence[int], texts: Sequence[str], now_s: float) -> None:
        """Add tokens that reach the log in one chunk, and the text that each of them completed."""
        self._tokens += token_ids
        self._texts += texts
        self._joined += [*[True] * (len(token_ids) - 1), False]
        if self._first_token_s is None:
            self._first_token_s = now_s

    def add_content(self, content: Mapping[str, Any]) -> None:
        """Add a chunk without tokens, given as fields of `OutputChunk`."""
        self._contents.append(content)
        self._contents_bytes += _size_of(content)

    def due_s(self) -> float | None:
        """The time when the next chunk is due; None while nothing waits. The first text is due at once."""
        if self._contents:
            return 0.0
        if not self._tokens:
            return None
        if not self._has_shown_text and any(self._texts):
            return 0.0
        since = self._cut_s if self._cut_s is not None else self._first_token_s
        assert since is not None
        return since + COALESCE_S

    def peek(self) -> OutputChunk:
        """The next chunk."""
        if self._contents:
            return self._chunk(**self._contents[0])
        count = self._next_count()
        return self._chunk(
            text="".join(self._texts[:count]),
            token_ids=self._tokens[:count],
            logprobs=self._logprobs[:count] or None,
            metadata={} if self._state.token_offset else dict(self.metadata),
        )

    def _next_count(self) -> int:
        """The number of tokens in the next chunk: whole emissions, one of them even if it is too long."""
        count = most = min(self._max_tokens, len(self._tokens))
        while count and self._joined[count - 1]:
            count -= 1
        if count:
            return count
        return most + self._joined[most - 1 :].index(False)

    @property
    def _max_tokens(self) -> int:
        """The most tokens in the next chunk, unless one emission is longer."""
        return tokens_per_chunk(len(self._logprobs[0].top)) if self._logprobs else MAX_CHUNK_TOKENS

    def take(self, chunk: OutputChunk, now_s: float) -> None:
        """Count a chunk that the log has accepted, and remove its content from the waiting output."""
        [valid] = self._state.track.fold(chunk)
        self._state.fold(valid)
        if self._contents:
            self._contents_bytes -= _size_of(self._contents.popleft())
            return
        count = len(chunk.token_ids)
        del self._tokens[:count], self._texts[:count], self._joined[:count], self._logprobs[:count]
        self._cut_s = now_s
        self._has_shown_text = self._has_shown_text or bool(chunk.text)

    def _chunk(self, **content: Any) -> OutputChunk:
        index = self._state.track.next_index
        return OutputChunk(
            id=f"{self._id}.{index}",
            request_id=self._request_id,
            attempt=self._attempt,
            index=index,
            choice=self._choice,
            track=self._track,
            text_offset=self._state.text_offset,
            token_offset=self._state.token_offset,
            **content,
        )


def _size_of(content: Mapping[str, Any]) -> int:
    return len(content.get("data") or b"") + len(content.get("text") or "")


PostChunk: TypeAlias = Callable[[OutputChunk, Callable[[int], None]], None]
"""Posts a chunk to the log's outbox and calls back once it is stored. A `CapacityError` means: try later."""


class OutputStream:
    """A chunker on the event loop, which posts its chunks when they are due.

    Attributes:
        has_room: true while the producer may add output.
        on_room: called with `has_room` whenever it changes; for producers that cannot await `wait_for_room`.
    """

    def __init__(self, chunker: Chunker, post: PostChunk) -> None:
        self._chunker = chunker
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._unacked = 0
        self.on_room: Callable[[bool], None] | None = None
        self.has_room = True
        self._room: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._failure: DalSegnoError | None = None
        self._closed = False

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Let the first chunk with tokens say this of the answer."""
        self._chunker.metadata = metadata

    def add(
        self, token_id: int, text: str, logprobs: TokenLogprobs | None = None, *, last: bool = False
    ) -> None:
        """Add a token and its text; with the last token, post all waiting output."""
        self._chunker.add(token_id, text, self._loop.time(), logprobs)
        self._cut(everything=last)

    def add_emission(self, token_ids: Sequence[int], texts: Sequence[str], *, last: bool = False) -> None:
        """Add tokens that reach the log in one chunk, as `add` adds one."""
        self._chunker.add_emission(token_ids, texts, self._loop.time())
        self._cut(everything=last)

    def add_content(self, content: Mapping[str, Any]) -> None:
        """Post a chunk without tokens at once, given as fields of `OutputChunk`."""
        self._chunker.add_content(content)
        self._cut()

    async def wait_stored(self) -> OutputTotals:
        """Post all waiting output, wait until every chunk is stored, and return the track's totals.

        Raises:
            DalSegnoError: the log rejected a chunk for good.
        """
        self._cut(everything=True)
        while self._unacked or self._chunker.pending:
            if self._failure is not None:
                raise self._failure
            self._settled = self._loop.create_future()
            await self._settled
        return self._chunker.totals

    async def wait_for_room(self) -> None:
        """Wait until more output may be added. Return at once after a failure; `wait_stored` raises it."""
        while not self.has_room:
            self._room = self._room if self._room and not self._room.done() else self._loop.create_future()
            await asyncio.shield(self._room)

    def close(self) -> None:
        """Stop posting."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _cut(self, *, everything: bool = False) -> None:
        self._cut_chunks(everything=everything)
        self._update_room()

    def _update_room(self) -> None:
        has_room = self._failure is not None or not self._chunker.full
        if has_room == self.has_room:
            return
        self.has_room = has_room
        if self.on_room is not None:
            self.on_room(has_room)
        if has_room and self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _cut_chunks(self, *, everything: bool) -> None:
        while not self._closed and self._failure is None and (due_s := self._chunker.due_s()) is not None:
            if not everything and due_s > self._loop.time() + _TIMER_GRAIN_S:
                self._arm(due_s)
                return
            try:
                self._post_chunk(self._chunker.peek())
            except CapacityError:
                self._arm(self._loop.time() + RETRY_S, everything=everything)
                return
            except DalSegnoError as error:
                self._failure = error
                self._settle()
                return

    def _post_chunk(self, chunk: OutputChunk) -> None:
        self._post(chunk, self._acked)
        self._unacked += 1
        self._chunker.take(chunk, self._loop.time())
        faults.reach("worker.chunk.posted")

    def _arm(self, at_s: float, *, everything: bool = False) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(at_s, self._on_timer, everything)

    def _on_timer(self, everything: bool) -> None:
        self._timer = None
        self._cut(everything=everything)

    def _acked(self, _seq: int) -> None:
        self._unacked -= 1
        faults.reach("worker.chunk.acked")
        self._settle()

    def _settle(self) -> None:
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
