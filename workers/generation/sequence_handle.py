"""Handle of one sequence in the engine: it turns the engine's outputs into text, chunks and stream items.

The handle lives on the event loop. It folds each sampled token into the generated text, adds token and text
to the output track, and passes the token on to streams. It ends with its text, or with an error.

A sequence that another rank continues (`HandoverHandle`, disaggregated prefill and decode) ends here with its
first token and emits nothing: the other rank folds that token again and emits all output.
"""

import asyncio
from collections.abc import Callable, Sequence

from shared.events import TokenLogprobs
from shared.tensors import Handle
from workers.data_plane.port import Array
from workers.generation.generated_text import STOP, GeneratedText
from workers.generation.output_chunks import OutputStream
from workers.generation.prompt_echo import ScoredEcho, token_logprobs
from workers.kv_engine.outputs import Output, PromptOutput, TokenOutput, TokenScore


class SequenceHandle:
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
        answer: GeneratedText,
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
                self.push(
                    output.token_id, None if score is None else token_logprobs(score, self.answer.bytes_of)
                )
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


class HandoverHandle(SequenceHandle):
    """A sequence that goes on at another rank.

    Attributes:
        token_ids: what was generated here.
        logprobs: of those, where they were asked for.
        prompt_scores: of the prompt's tokens but the first, where they were asked for.
        kv: its keys and values; there when it has ended, unless an earlier attempt had ended it.
    """

    def __init__(self, key: str, answer: GeneratedText) -> None:
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
            self.logprobs.append(token_logprobs(output.score, self.answer.bytes_of))
        if output.finish is not None:
            self.kv = output.kv
            self.end()

    def resume(self, last_token: int) -> None:
        """Its answer was folded over the tokens of earlier attempts; it is to have one more, or had ended."""
        self.last_token = last_token
        if self.answer.finish_reason is not None:
            self.end()
