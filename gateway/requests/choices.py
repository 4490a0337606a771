"""Choices: one HTTP request that asks for several answers is as many requests on the log.

`n` answers to each of a list of prompts are parts of one question. Each part is a request of its own, with
an id, a submission, chunks and an end of its own, so workers batch them, and a replay takes them one by
one. The first part has the question's id, part k the id `<id>-<k>`; each names the question as its `parent`.
The choice's index is OpenAI's: prompt x n + choice.

Their chunks are merged as they arrive. Memory stays bounded: every part has its relay's own buffer (see
`gateway.requests.relay`), and waits before it hands on a chunk until the last one is taken. A question is
answered when all its parts are; when one fails, the whole fails, and the others are cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import msgspec

from gateway.requests.relay import Answered, Item
from gateway.requests.service import Gateway
from gateway.requests.submission import Asked, Claim, Recorded
from shared.errors import ClientError
from shared.events import Inputs, OutputChunk, Usage
from shared.ids import RequestId, is_token

Tagged: TypeAlias = tuple[int, Item]
"""A choice's index, and a piece of its answer or its end."""


def split(asked: Asked, prompts: Sequence[Inputs], n: int) -> list[Asked]:
    """The parts of a question, by choice: `n` answers to each prompt. A single one is the question itself.

    Raises:
        ClientError: the question's id leaves no room for the parts' ids.
    """
    count = len(prompts) * n
    if count == 1:
        return [asked]
    return [
        replace(
            asked,
            request_id=_part_id(asked.request_id, number, count),
            inputs=prompts[number // n],
            params=msgspec.structs.replace(asked.params, choice=number % n),
            parent=asked.request_id,
            parts=count,
        )
        for number in range(count)
    ]


def _part_id(question: RequestId, number: int, count: int) -> RequestId:
    part = f"{question}-{number}" if number else question
    if not is_token(f"{question}-{count - 1}"):
        most = 64 - len(f"-{count - 1}")
        raise ClientError(
            f"request_id has {len(question)} characters: expected at most {most} where {count} answers are "
            "asked for, which have ids of their own behind it",
            code="invalid_request_id",
        )
    return RequestId(part)


@dataclass(slots=True)
class Tally:
    """The usage of a question: each prompt counted once, the answers all."""

    n: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, choice: int, end: Answered) -> None:
        """Take one choice's end."""
        if choice % self.n == 0:
            self.prompt_tokens += end.usage.prompt_tokens
        self.completion_tokens += end.usage.completion_tokens
        self.cached_tokens += end.usage.cached_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )


class Choices:
    """One client's hold on all parts of its question.

    Attributes:
        on_attached: called when a part turns out to have been submitted before.
    """

    def __init__(self, gateway: Gateway, parts: Sequence[Asked]) -> None:
        self.on_attached: Callable[[], None] = lambda: None
        self._gateway = gateway
        self._parts: Final = parts
        self._claims: list[Claim] = []

    @property
    def recorded(self) -> Recorded | None:
        """What the log says of the question, once it says anything of a part of it."""
        return next((claim.recorded for claim in self._claims if claim.recorded is not None), None)

    async def items(self, tasks: asyncio.TaskGroup) -> AsyncGenerator[Tagged, None]:
        """All choices' chunks and ends as they come; `tasks` runs what waits for them.

        Raises:
            DalSegnoError: a part cannot be submitted, or its log was lost.
        """
        if len(self._parts) == 1:  # without a queue between: this is what most ask for
            async with aclosing(await self._claim(self._parts[0])) as items:
                async for item in items:
                    yield 0, item
            return
        arrivals: asyncio.Queue[Tagged | Exception] = asyncio.Queue(maxsize=1)
        pumps = [
            tasks.create_task(self._pump(choice, part, arrivals), name=f"choice {part.request_id}")
            for choice, part in enumerate(self._parts)
        ]
        try:
            unended = len(pumps)
            while unended:
                arrived = await arrivals.get()
                if isinstance(arrived, Exception):
                    raise arrived
                yield arrived
                unended -= not isinstance(arrived[1], OutputChunk)
        finally:
            for pump in pumps:
                pump.cancel()

    def leave(self, cancel: str = "", *, linger_s: float = 0.0) -> None:
        """Let go of all parts; with a reason to `cancel`, they end if nobody else here wants them.

        They go on for `linger_s` seconds before that, for a client that comes back.
        """
        for claim in self._claims:
            claim.leave(cancel, linger_s=linger_s)

    async def _claim(self, part: Asked) -> AsyncGenerator[Item, None]:
        claim = await self._gateway.submit(part, self._claims.append)
        if claim.is_attached:
            self.on_attached()
        return claim.items()

    async def _pump(self, choice: int, part: Asked, arrivals: "asyncio.Queue[Tagged | Exception]") -> None:
        try:
            async with aclosing(await self._claim(part)) as items:
                async for item in items:
                    await arrivals.put((choice, item))
        except Exception as error:  # noqa: BLE001 - it is the answer's, which tells its client
            await arrivals.put(error)
