"""Responses that are on the log. It is the only store, so every gateway answers the same.

A response belongs to the API key that asked for it: for other keys it does not exist, and neither does one
with `store: false`. A deletion is an event of its own; the records leave the log with their age.
"""

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from gateway.requests import recorded_answer
from gateway.requests.recorded_answer import answer_of, status_of
from gateway.requests.relay import Answered, Failed, RequestForgottenError
from gateway.requests.request_ids import is_forgotten
from gateway.requests.service import Gateway
from gateway.requests.status import ENDED, PartStatus
from gateway.responses.answers import ResponseBuilder, ResponseHead, failed_document, response_of
from gateway.responses.request import API
from shared.errors import ClientError
from shared.events import RequestSubmitted, Usage
from shared.ids import parse_request_id

_NS: Final = 1_000_000_000
_STATUS: Final = {"waiting": "queued", "running": "in_progress", "cancelling": "in_progress"}


class NoResponseError(ClientError):
    """There is no such response, or it is another tenant's."""

    code = "response_not_found"
    status = 404

    def __init__(self, response_id: str, param: str = "response_id") -> None:
        super().__init__(
            f"there is no response {response_id[:80]!r} here: it was deleted, was never asked for with this "
            "API key, was asked for with store: false, or is older than the log"
        )
        self.param = param


class NoItemError(ClientError):
    """There is no such item in a stored response."""

    code = "item_not_found"
    status = 404

    def __init__(self, where: str, item_id: str) -> None:
        super().__init__(
            f"{where}: there is no item {item_id[:80]!r} of a stored response here; send the item itself"
        )
        self.param = where


class NotInBackgroundError(ClientError):
    """A response that cannot be cancelled."""

    code = "not_in_background"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response on the log."""

    part: PartStatus
    event: RequestSubmitted

    @property
    def has_ended(self) -> bool:
        return self.part.status in ENDED

    @property
    def completed_s(self) -> int | None:
        """When it ended, in seconds since 1970."""
        return None if self.part.ended_ns is None else self.part.ended_ns // _NS

    def head(self, gateway: Gateway) -> ResponseHead:
        created_s = self.event.created_s or self.part.submitted_ns // _NS
        return ResponseHead.of(gateway, self.part.id, created_s, self.event)


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The responses of one tenant; None is that of a deployment without keys."""

    gateway: Gateway
    tenant: str | None

    async def one(
        self, response_id: str, param: str = "response_id", *, with_deleted: bool = False
    ) -> StoredResponse:
        """Return a response; `with_deleted` also one whose output is kept elsewhere.

        Raises:
            NoResponseError, RequestForgottenError: there is none, or the log holds it no more.
            LogUnavailableError: the log does not answer.
        """
        request_id = parse_request_id(response_id)
        part = await status_of(self.gateway, request_id)
        event = part.event
        if event is None and is_forgotten(request_id, await self.gateway.log.state()):
            raise RequestForgottenError(request_id)
        is_gone = part.is_deleted and not with_deleted
        if event is None or is_gone or not self._is_own(event):
            raise NoResponseError(response_id, param)
        return StoredResponse(part, event)

    def _is_own(self, event: RequestSubmitted) -> bool:
        fields = event.api_fields
        return event.tenant == self.tenant and fields.get("api") == API and bool(fields.get("store"))

    async def document(self, found: StoredResponse) -> dict[str, Any]:
        """The response object."""
        head, part = found.head(self.gateway), found.part
        match part.status:
            case "finished":
                builder, usage = await self._read(found)
                return builder.document(usage, found.completed_s)
            case "cancelled":
                return head.document("cancelled")
            case "failed" | "rejected":
                assert part.failure is not None, "what failed has a reason"
                return failed_document(head, part.failure)
            case status:
                return head.document(_STATUS[status])

    async def messages(self, response_id: str) -> list[dict[str, Any]]:
        """The chat of a response with its answer, without its instructions: what the next one continues.

        Raises:
            ClientError: there is none, it has not been completed, or it has media.
        """
        where = "previous_response_id"
        found = await self.one(response_id, where)
        if found.part.status != "finished":
            raise _wrong(
                where, f"{where}: expected a response that has ended, this one is {found.part.status}"
            )
        if found.event.inputs.files:
            raise _wrong(
                where,
                f"{where}: a response with media is not continued; send its items as input again",
                code="not_supported",
            )
        builder, usage = await self._read(found)
        output = builder.document(usage)["output"]
        return [*self.own_messages(found), *_answer(output)]

    async def resolved(self, found: object) -> object:
        """The input of a response, with the items that it refers to by their ids.

        Raises:
            NoItemError: there is no such item.
        """
        if not isinstance(found, list):
            return found
        outputs: dict[str, list[dict[str, Any]]] = {}
        items = []
        for number, item in enumerate(found):
            if not isinstance(item, dict) or item.get("type") != "item_reference":
                items.append(item)
                continue
            place, item_id = f"input[{number}].id", str(item.get("id"))
            response_id = response_of(item_id)
            if response_id not in outputs:
                outputs[response_id] = await self._output(response_id, place, item_id)
            named = [one for one in outputs[response_id] if one["id"] == item_id]
            if not named:
                raise NoItemError(place, item_id)
            items += named
        return items

    async def _output(self, response_id: str, place: str, item_id: str) -> list[dict[str, Any]]:
        try:
            found = await self.one(response_id)
        except ClientError as error:
            raise NoItemError(place, item_id) from error
        output: list[dict[str, Any]] = (await self.document(found))["output"]
        return output

    def own_messages(self, found: StoredResponse) -> list[dict[str, Any]]:
        """The messages of a response's chat without its instructions."""
        skipped = 1 if found.event.api_fields.get("has_instructions") else 0
        return list(found.event.inputs.messages or [])[skipped:]

    async def cancel(self, found: StoredResponse) -> None:
        """Cancel a response unless it has ended.

        Raises:
            NotInBackgroundError: it was not asked for in the background.
        """
        if not found.event.api_fields.get("background"):
            raise NotInBackgroundError(
                "response_id: expected a response in the background; close the connection to cancel another"
            )
        if found.has_ended:
            return
        recorded = await recorded_answer.recorded_request(self.gateway, found.part.id)
        await recorded_answer.cancel(self.gateway, recorded)

    async def delete(self, found: StoredResponse) -> None:
        """Cancel a response unless it has ended, and delete it."""
        await recorded_answer.delete(self.gateway, found.part.id)

    async def _read(self, found: StoredResponse) -> tuple[ResponseBuilder, Usage]:
        """The whole answer.

        Raises:
            NoResponseError: the log has forgotten a part of it.
        """
        builder = ResponseBuilder(found.head(self.gateway))
        async with aclosing(answer_of(self.gateway, found.part)) as items:
            async for item in items:
                if isinstance(item, Failed):
                    break
                if isinstance(item, Answered):
                    builder.end(item.finish_reason)
                    return builder, item.usage
                if not item.advisory:
                    builder.push(item)
        raise NoResponseError(found.part.id)


def _answer(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output of a response as a message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in output:
        match item["type"]:
            case "reasoning":
                thought = "".join(part["text"] for part in item["content"])
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case "message":
                message["content"] += "".join(part["text"] for part in item["content"])
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case _:
                pass
    return [message]


def _wrong(param: str, message: str, code: str = "invalid_value") -> ClientError:
    error = ClientError(message, code=code)
    error.param = param
    return error
