"""Rows: the event loop's side of the sequences in the engine.

The engine hands over the tokens of a step; each goes to its row, which folds it into text and chunks,
beside the engine's next step. A row ends when its answer does, when the engine gives it up, or when it is
dropped. A stop string ends the answer before the engine knows: the row is then cancelled there, and
tokens that were under way are of no account.

A row that goes on at another rank (`MovingRow`) ends here with its first token and says nothing: that rank
folds the token again, and puts out everything.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from shared import faults
from shared.errors import BugError, DalSegnoError
from shared.events import TokenLogprobs
from shared.telemetry.log_fields import MAY_QUOTE
from shared.tensors import Handle
from workers.data_plane.port import Array
from workers.generation.generated_text import STOP, Answer
from workers.generation.output_chunks import OutputStream
from workers.generation.prompt_echo import ScoredEcho, spell
from workers.kv_engine.sequence import Output, PromptOutput, SequenceSpec, TokenOutput, TokenScore

_LOGGER: Final = logging.getLogger(__name__)


class EnginePort(Protocol):
    """What rows ask of the engine's thread (`workers.kv_engine.thread.EngineThread`)."""

    def submit(self, spec: SequenceSpec) -> None: ...
    def cancel(self, key: str) -> None: ...
    def hold(self, key: str) -> None: ...
    def resume(self, key: str) -> None: ...


class Row:
    """One sequence, from its submission to its end.

    Args:
        output: where its tokens go; None for those nobody reads.
        echo: the prompt, as far as it waits for its scores; it goes where the tokens go.
        on_item: called with each token, and its place in the answer, that streams on: all but one that
            ended the answer because it is no part of it.

    Attributes:
        began: its first token is there (or was there before: an earlier attempt's).
        ended: its answer has ended; raises what the engine, or the text, failed of.
        vector, cached_tokens: what its prompt came to, where that was asked for (`PromptOutput`).
    """

    def __init__(
        self,
        key: str,
        answer: Answer,
        output: OutputStream | None,
        echo: ScoredEcho | None = None,
        on_item: Callable[[int, int], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        self.answer = answer
        self.output = output
        self.echo = echo
        self.on_item = on_item
        self.last_token: int | None = None
        self.vector: Array | None = None
        self.cached_tokens = 0
        self.began: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def take(self, output: Output) -> None:
        """Take what a step led to."""
        match output:
            case TokenOutput():
                score = output.score
                self.push(output.token_id, None if score is None else spell(score, self.answer.bytes_of))
            case PromptOutput():
                if output.scores:
                    self.put_echo(output.scores)
                if output.finish is not None:
                    self.vector, self.cached_tokens = output.vector, output.cached_tokens
                    self.end()

    def end(self) -> None:
        """Its answer has ended."""
        if not self.began.done():
            self.began.set_result(None)
        self.ended.set_result(None)

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Fold a token, put it out, and stream it on."""
        text = self.answer.push(token_id)
        self.last_token = token_id
        has_ended = self.answer.finish_reason is not None
        if self.output is not None:
            self.output.add(token_id, text, logprobs, last=has_ended)
        if self.on_item is not None and self.answer.finish_reason != STOP:
            self.on_item(token_id, self.answer.tokens - 1)
        if has_ended:
            self.end()
        elif not self.began.done():
            self.began.set_result(None)

    def put_echo(self, scores: Sequence[TokenScore]) -> None:
        """The next of the prompt's tokens are scored."""
        assert self.echo is not None, "a prompt is scored for its echo"
        assert self.output is not None, "an echo is for somebody"
        for content in self.echo.push(scores):
            self.output.add_content(content)

    def resume(self, last_token: int) -> None:
        """Its answer was folded over the tokens of earlier attempts, the last of which is `last_token`."""
        self.last_token = last_token
        self.began.set_result(None)
        if self.answer.finish_reason is not None:
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """It ends without an answer."""
        for future in (self.began, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits is told; if nobody does, that is no error


class MovingRow(Row):
    """A sequence that goes on at another rank.

    Attributes:
        token_ids: what was generated here.
        logprobs: of those, where they were asked for.
        prompt_scores: of the prompt's tokens but the first, where they were asked for.
        kv: its keys and values; there when it has ended, unless an earlier attempt had ended it.
    """

    def __init__(self, key: str, answer: Answer) -> None:
        super().__init__(key, answer, output=None)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_scores: list[TokenScore] = []
        self.kv: Handle | None = None

    def take(self, output: Output) -> None:
        """Take what a step led to."""
        if isinstance(output, PromptOutput):
            self.prompt_scores += output.scores
            return
        self.answer.push(output.token_id)
        self.last_token = output.token_id
        self.token_ids.append(output.token_id)
        if output.score is not None:
            self.logprobs.append(spell(output.score, self.answer.bytes_of))
        if output.finish is not None:
            self.kv = output.kv
            self.end()

    def resume(self, last_token: int) -> None:
        """Its answer was folded over the tokens of earlier attempts; it is to have one more, or had ended."""
        self.last_token = last_token
        if self.answer.finish_reason is not None:
            self.end()


class Rows:
    """All rows by key, and the callbacks the engine's thread needs. `engine` is set once it is made."""

    def __init__(self) -> None:
        self.engine: EnginePort | None = None
        self._rows: dict[str, Row] = {}
        self._drops: dict[str, asyncio.Future[int]] = {}
        self._held: dict[str, set[object]] = {}

    def submit(self, spec: SequenceSpec, row: Row) -> None:
        """Hand a sequence to the engine.

        Raises:
            CapacityError: the engine has too many.
        """
        assert self.engine is not None
        self.engine.submit(spec)
        self._rows[row.key] = row

    async def drop(self, key: str) -> int:
        """Take a row out of the engine; how many more steps held it. 0 when it is not there any more."""
        if self._forget(key) is None:
            return 0
        assert self.engine is not None
        dropped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drops[key] = dropped
        self.engine.cancel(key)
        return await dropped

    def hold(self, key: str, by: object) -> None:
        """Let the engine compute no more of a row for now; it keeps its place.

        Several may hold it, each for a reason of its own: it goes on when the last lets it.
        """
        if key not in self._rows:
            return
        holders = self._held.setdefault(key, set())
        if not holders:
            assert self.engine is not None
            self.engine.hold(key)
        holders.add(by)

    def resume(self, key: str, by: object) -> None:
        """Let a row go on that was held `by` whoever says so."""
        holders = self._held.get(key, set())
        holders.discard(by)
        if key in self._held and not holders:
            del self._held[key]
            assert self.engine is not None
            self.engine.resume(key)

    # ---- called by the engine's thread, on the loop ------------------------------------------------
    def on_outputs(self, outputs: Sequence[Output]) -> None:
        """What a step led to."""
        for output in outputs:
            row = self._rows.get(output.key)
            if row is None:
                continue  # its answer has ended, or it was dropped
            faults.reach("worker.token.computed")
            try:
                row.take(output)
            except Exception as error:  # one row's text must not hold up the others
                _LOGGER.exception("the text of %s failed", output.key, extra=MAY_QUOTE)
                row.fail(error)
            self._settle(row, in_engine=output.finish is None)

    def on_error(self, keys: Sequence[str], error: DalSegnoError) -> None:
        """The engine gave these up."""
        for key in keys:
            if (row := self._forget(key)) is not None:
                row.fail(error)

    def on_cancelled(self, key: str, steps_after: int) -> None:
        """The engine has forgotten a sequence."""
        dropped = self._drops.pop(key, None)
        if dropped is not None and not dropped.done():
            dropped.set_result(steps_after)

    def _settle(self, row: Row, *, in_engine: bool) -> None:
        """Take the row out where its text, or the engine, has come to an end."""
        if not row.ended.done() and not in_engine:
            row.fail(BugError(f"the engine ended {row.key} before its answer ended"))
        if not row.ended.done():
            return
        self._forget(row.key)
        if in_engine:
            assert self.engine is not None
            self.engine.cancel(row.key)

    def _forget(self, key: str) -> Row | None:
        self._held.pop(key, None)
        return self._rows.pop(key, None)
