"""Choices: an HTTP request for several answers becomes one request on the log for each answer.

`n` answers to each of a list of prompts form a group. Each choice is a separate request with its own id,
submission, chunks and end. So workers batch the choices, and a replay treats them separately. The first
choice has the group's id, choice k the id `<id>-<k>`; each names the group's id as its `parent`. The index of
a choice is OpenAI's: prompt x n + choice.

The chunks of all choices are merged as they arrive. Memory is bounded: each choice has the buffer of its
relay (`gateway.requests.relay`), and hands on a chunk only after the previous one was taken. The answer is
complete when all choices are. When one fails, the whole answer fails, and the other choices are cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeAlias

import msgspec

from gateway.requests.milestones import Milestones
from gateway.requests.parsed_request import ParsedRequest
from gateway.requests.relay import AnswerItem
from gateway.requests.service import Gateway
from gateway.requests.submission import SubmissionRecord, Subscription
from shared.errors import ClientError
from shared.events import Inputs, OutputChunk
from shared.ids import RequestId, is_token

ChoiceItem: TypeAlias = tuple[int, AnswerItem]
"""A choice's index, and a chunk or the end of its answer."""


def split(request: ParsedRequest, prompts: Sequence[Inputs], n: int) -> list[ParsedRequest]:
    """The requests of a group, in the order of the choices: `n` for each prompt. A single one stays as it is.

    Raises:
        ClientError: the group's id is too long for the ids of the choices.
    """
    count = len(prompts) * n
    if count == 1:
        return [request]
    return [
        replace(
            request,
            request_id=_choice_id(request.request_id, number, count),
            inputs=prompts[number // n],
            params=msgspec.structs.replace(request.params, choice=number % n),
            parent=request.request_id,
            parts=count,
            part=number,
        )
        for number in range(count)
    ]


def _choice_id(group: RequestId, number: int, count: int) -> RequestId:
    if not is_token(f"{group}-{count - 1}"):
        most = 64 - len(f"-{count - 1}")
        raise ClientError(
            f"request_id has {len(group)} characters: expected at most {most} for {count} answers, because "
            f"each has its own id, up to ID-{count - 1}",
            code="invalid_request_id",
        )
    return RequestId(f"{group}-{number}" if number else group)


class MergedChoices:
    """One client's subscriptions to all choices of a group, merged.

    Attributes:
        on_attached: called when a choice turns out to have been submitted before.
        milestones: returns those of a request, for its trace; None if the answer is not traced.
    """

    def __init__(self, gateway: Gateway, requests: Sequence[ParsedRequest]) -> None:
        self.on_attached: Callable[[], None] = lambda: None
        self.milestones: Callable[[str], Milestones] | None = None
        self._gateway = gateway
        self._requests: Final = requests
        self._subscriptions: list[Subscription] = []

    @property
    def recorded(self) -> SubmissionRecord | None:
        """The facts about the first choice that is stored; None before that."""
        return next((one.recorded for one in self._subscriptions if one.recorded is not None), None)

    async def items(self, tasks: asyncio.TaskGroup) -> AsyncGenerator[ChoiceItem, None]:
        """The chunks and ends of all choices as they arrive; `tasks` runs the tasks that wait for them.

        Raises:
            DalSegnoError: a choice cannot be submitted, or its log was lost.
        """
        if len(self._requests) == 1:  # the common case needs no queue
            async with aclosing(await self._submit(self._requests[0])) as items:
                async for item in items:
                    yield 0, item
            return
        arrivals: asyncio.Queue[ChoiceItem | Exception] = asyncio.Queue(maxsize=1)
        pumps = [
            tasks.create_task(self._pump(choice, request, arrivals), name=f"choice {request.request_id}")
            for choice, request in enumerate(self._requests)
        ]
        try:
            open_choices = len(pumps)
            while open_choices:
                arrived = await arrivals.get()
                if isinstance(arrived, Exception):
                    raise arrived
                yield arrived
                open_choices -= not isinstance(arrived[1], OutputChunk)
        finally:
            for pump in pumps:
                pump.cancel()

    def release(self, cancel: str = "", *, grace_s: float = 0.0) -> None:
        """End all subscriptions; `cancel` and `grace_s` are those of `Subscription.release`."""
        for subscription in self._subscriptions:
            subscription.release(cancel, grace_s=grace_s)

    async def _submit(self, request: ParsedRequest) -> AsyncGenerator[AnswerItem, None]:
        subscription = await self._gateway.submit(request, self._subscribed)
        if subscription.is_attached:
            self.on_attached()
        return subscription.items()

    def _subscribed(self, subscription: Subscription) -> None:
        self._subscriptions.append(subscription)
        if self.milestones is not None:
            subscription.relay.milestones = self.milestones(subscription.relay.request_id)

    async def _pump(
        self, choice: int, request: ParsedRequest, arrivals: "asyncio.Queue[ChoiceItem | Exception]"
    ) -> None:
        try:
            async with aclosing(await self._submit(request)) as items:
                async for item in items:
                    await arrivals.put((choice, item))
        except Exception as error:  # noqa: BLE001 - the consumer raises it
            await arrivals.put(error)
