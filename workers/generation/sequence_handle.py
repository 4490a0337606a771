"""Handle of one sequence in the engine: it turns the engine's outputs into text, chunks and stream items.

The handle lives on the event loop. It folds each sampled token into the generated text, adds token and text
to the output track, and passes the token on to streams. It ends with its text, or with an error.

A sequence that another rank continues (`HandoverHandle`, disaggregated prefill and decode) ends here with its
first token and emits nothing: the other rank folds that token again and emits all output.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from shared.errors import BugError
from shared.events import TokenLogprobs
from shared.tensors import Handle
from workers.data_plane.port import Array
from workers.generation.generated_text import STOP, GeneratedText
from workers.generation.output_chunks import OutputStream
from workers.generation.prompt_echo import ScoredEcho, token_logprobs
from workers.kv_engine.outputs import (
    EmissionOutput,
    Output,
    ProgramOutput,
    ProgramReport,
    PromptOutput,
    StateOutput,
    TokenOutput,
    TokenScore,
)
from workers.threads.engine_work import EngineWork

OnItem: TypeAlias = Callable[[int, int], None]
"""Takes a token that goes into a stream: (token id, index in the generated text)."""
OnTensors: TypeAlias = Callable[[Mapping[str, Array]], None]
"""Takes tensors that go into streams, by edge: an item for each row."""


class SequenceHandle:
    """One sequence, from its submission to its end.

    Args:
        output: the track that its tokens go to; None where no client reads them.
        echo: the part of the prompt's echo that waits for scores; it goes to the same track.
        on_item: takes each token of the text that goes into a stream; a stop token is not part of the text.
        on_tensors: takes what the engine computed besides tokens: of computed tokens, and of each token of
            the text. None where it goes into no stream.

    Attributes:
        began: done once there is a first token, also one of an earlier attempt, with that token; with None
            where the sequence ends without one.
        last_token: the newest token; the engine may be ahead of who waits for `began`.
        ended: done once the text has ended; raises the error of the engine or of the text.
        vector, cached_tokens: the result of the prompt, where it was requested (`PromptOutput`).
        counts: what its token program has counted; empty without one.
        rest: text without a token, for the track: the end of an answer that its token program ended early.
        work: the record of its work in the engine.
    """

    def __init__(
        self,
        key: str,
        generated: GeneratedText,
        output: OutputStream | None,
        echo: ScoredEcho | None = None,
        on_item: OnItem | None = None,
        on_tensors: OnTensors | None = None,
        work: EngineWork | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        self.generated = generated
        self.output = output
        self.echo = echo
        self.on_item = on_item
        self.on_tensors = on_tensors
        self.last_token: int | None = None
        self.vector: Array | None = None
        self.cached_tokens = 0
        self.counts: Mapping[str, int] = {}
        self.rest = ""
        self.work = work or EngineWork()
        self.began: asyncio.Future[int | None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._pushed: asyncio.Future[None] | None = None

    async def next_token(self) -> None:
        """Wait for another token."""
        self._pushed = asyncio.get_running_loop().create_future()
        await self._pushed

    def take(self, output: Output) -> None:
        """Take an output of an engine step."""
        match output:
            case TokenOutput():
                score = output.score
                logprobs = None if score is None else token_logprobs(score, self.generated.bytes_of)
                self.push(output.token_id, logprobs)
                self._send_values(output)
            case StateOutput():
                assert self.on_tensors is not None, "states are computed for streams"
                self.on_tensors(output.values)
            case PromptOutput():
                if output.scores:
                    self.push_prompt_scores(output.scores)
                if output.finish is not None:
                    self.vector, self.cached_tokens = output.vector, output.cached_tokens
                    self.end()
            case EmissionOutput():
                self.push_emission(output)
            case ProgramOutput() | ProgramReport():
                raise BugError(f"sequence {self.key}: expected tokens, found the outputs of a program")

    def end(self) -> None:
        """End the sequence."""
        if not self.began.done():
            self.began.set_result(self.last_token)
        self.ended.set_result(None)

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Fold a token into the text, add it to the output, and pass it to streams."""
        text = self.generated.push(token_id)
        self.work.token()
        self.last_token = token_id
        if self._pushed is not None and not self._pushed.done():
            self._pushed.set_result(None)
        has_ended = self.generated.finish_reason is not None
        if self.output is not None:
            self.output.add(token_id, text, logprobs, last=has_ended)
        if self.on_item is not None and self.generated.finish_reason != STOP:
            self.on_item(token_id, self.generated.tokens - 1)
        if has_ended:
            self.end()
        elif not self.began.done():
            self.began.set_result(self.last_token)

    def _send_values(self, output: TokenOutput) -> None:
        """Pass what was made after a token to streams, unless the token ended the text."""
        if self.on_tensors is not None and output.values and self.generated.finish_reason != STOP:
            self.on_tensors(output.values)

    def push_emission(self, emitted: EmissionOutput) -> None:
        """Fold tokens that belong together, up to the end of the text, as `push` folds one."""
        self.counts = emitted.counts
        texts: list[str] = []
        for token_id in emitted.token_ids:
            texts.append(self.generated.push(token_id))
            if self.generated.finish_reason is not None:
                break
        if emitted.finish is not None and self.generated.finish_reason is None:
            self.rest = self.generated.end_by_length()
        taken = emitted.token_ids[: len(texts)]
        has_ended = self.generated.finish_reason is not None
        if taken:
            self.work.token()
            self.last_token = taken[-1]
            self._emit(taken, texts, last=has_ended)
        if has_ended:
            self.end()
        elif not self.began.done():
            self.began.set_result(self.last_token)

    def _emit(self, token_ids: Sequence[int], texts: Sequence[str], *, last: bool) -> None:
        if self.output is not None:
            self.output.add_emission(token_ids, texts, last=last)
        if self.on_item is not None:
            first = self.generated.tokens - len(token_ids)
            ended_by_last = self.generated.finish_reason == STOP
            for index, token_id in enumerate(token_ids[: len(token_ids) - ended_by_last], first):
                self.on_item(token_id, index)

    def push_prompt_scores(self, scores: Sequence[TokenScore]) -> None:
        """Take the scores of the prompt's next tokens; emit the echo pieces that they complete."""
        assert self.echo is not None, "a prompt is scored for its echo"
        assert self.output is not None, "an echo has a track"
        for content in self.echo.push(scores):
            self.output.add_content(content)

    def resume(self, token_ids: Sequence[int]) -> None:
        """Continue after the tokens of earlier attempts, at least one, already folded."""
        self.last_token = token_ids[-1]
        self.began.set_result(token_ids[0])
        if self.generated.finish_reason is not None:
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the sequence with an error."""
        for future in (self.began, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: it is no error if nothing awaits this future


class StatesHandle:
    """A prompt that is computed for the tensors of its tokens alone: the tokens are those of a text.

    Attributes:
        ended: done once all of them are computed.
    """

    def __init__(self, key: str, on_tensors: OnTensors) -> None:
        self.key = key
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_tensors = on_tensors

    def take(self, output: Output) -> None:
        """Take an output of an engine step."""
        if isinstance(output, StateOutput):
            self._on_tensors(output.values)
        elif output.finish is not None:
            self.ended.set_result(None)

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as retrieved: it is no error if nothing awaits this future


class HandoverHandle(SequenceHandle):
    """A sequence that another rank continues after its first token.

    Attributes:
        token_ids, logprobs: the tokens generated here; their log probabilities, where requested.
        prompt_scores: scores of the prompt's tokens except the first, where requested.
        kv: keys and values, set when the sequence has ended, unless an earlier attempt had ended it.
    """

    def __init__(self, key: str, generated: GeneratedText, work: EngineWork | None = None) -> None:
        super().__init__(key, generated, output=None, work=work)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_scores: list[TokenScore] = []
        self.kv: Handle | None = None

    def take(self, output: Output) -> None:
        """Take an output of an engine step."""
        if isinstance(output, PromptOutput):
            self.prompt_scores += output.scores
            return
        if not isinstance(output, TokenOutput):
            raise BugError(f"sequence {self.key}: expected single tokens, found {type(output).__name__}")
        self.generated.push(output.token_id)
        self.work.token()
        self.last_token = output.token_id
        self.token_ids.append(output.token_id)
        if output.score is not None:
            self.logprobs.append(token_logprobs(output.score, self.generated.bytes_of))
        if output.finish is not None:
            self.kv = output.kv
            self.end()

    def resume(self, token_ids: Sequence[int]) -> None:
        """Continue after tokens of earlier attempts: to generate one more, or to end at once."""
        self.last_token = token_ids[-1]
        if self.generated.finish_reason is not None:
            self.end()
