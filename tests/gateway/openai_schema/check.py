"""Checks of the gateway's responses against OpenAI's published schema.

`extract` writes `schemas.json`, which is used unchanged, with every `required` and every `enum`. In six
places OpenAI's own service differs from its schema, and clients rely on the service. There the gateway does
as the service does, and `AS_SERVED` has the differences:

- a chunk of a completion's stream has `finish_reason` null until its end (published: never null);
- its requested `usage` is null before the last chunk (published: null in chats only);
- the log probability and the alternatives of the first token of an echoed prompt are null;
- an image has any size, as the `size` of a request may be (published: three sizes);
- so has a video (published: four sizes);
- what a batch does not have, and the ids of an empty page, are null (published: left out).

`COUNTS` has the number of checked bodies of each schema; `tests/gateway/conftest.py` prints it.
"""

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
from jsonschema import Draft202012Validator

from gateway.errors import OLLAMA

SCHEMAS: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_name("schemas.json").read_text(encoding="utf-8")
)
CHAT: Final = "CreateChatCompletionResponse"
CHAT_CHUNK: Final = "CreateChatCompletionStreamResponse"
COMPLETION: Final = "CreateCompletionResponse"
COMPLETION_CHUNK: Final = "CreateCompletionResponse as served in a stream"
ECHOED: Final = "CreateCompletionResponse as served with an echo"
ERROR: Final = "ErrorResponse"
MODELS: Final = "ListModelsResponse"
MODEL: Final = "Model"
SPEECH: Final = {
    "speech.audio.delta": "SpeechAudioDeltaEvent",
    "speech.audio.done": "SpeechAudioDoneEvent",
}
"""By the `type` of an event."""
IMAGES: Final = "ImagesResponse as served"
IMAGE_EVENTS: Final = {
    f"{kind}.{event}": f"{name}{event_name}Event as served"
    for kind, name in (("image_generation", "ImageGen"), ("image_edit", "ImageEdit"))
    for event, event_name in (("partial_image", "PartialImage"), ("completed", "Completed"))
}
"""By the `type` of an event."""
VIDEO: Final = "VideoResource as served"
VIDEO_LIST: Final = "VideoListResource as served"
DELETED_VIDEO: Final = "DeletedVideoResource"
BATCH: Final = "Batch as served"
BATCH_LIST: Final = "ListBatchesResponse as served"
RESPONSE: Final = "Response"
CONVERSATION: Final = "ConversationResource"
CONVERSATION_ITEMS: Final = "ConversationItemList as served"
DELETED_CONVERSATION: Final = "DeletedConversationResource"
RESPONSE_EVENTS: Final[dict[str, str]] = {
    SCHEMAS["$defs"][name]["properties"]["type"]["enum"][0]: name
    for one in SCHEMAS["$defs"]["ResponseStreamEvent"]["anyOf"]
    for name in [one["$ref"].rpartition("/")[2]]
}
"""By the `type` of an event."""
RESPONSE_ITEMS: Final = "ResponseItemList"
COUNTS: Final[Counter[str]] = Counter()
ERROR_STATUSES: Final[Counter[int]] = Counter()
_NULL: Final = {"type": "null"}


def _echoed() -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"][COMPLETION])
    [lists, _] = changed["properties"]["choices"]["items"]["properties"]["logprobs"]["anyOf"]
    for name in ("token_logprobs", "top_logprobs"):
        array = lists["properties"][name]
        array["prefixItems"] = [{"anyOf": [array["items"], _NULL]}]  # only the first
    return changed


def _chunk() -> dict[str, Any]:
    changed = _echoed()
    choice = changed["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"] = {"anyOf": [choice["finish_reason"], _NULL]}
    changed["properties"]["usage"] = {"anyOf": [changed["properties"]["usage"], _NULL]}
    return changed


def _any_size(name: str) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"][name.removesuffix(" as served")])
    del changed["properties"]["size"]["enum"]
    return changed


def _any_video() -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"]["VideoResource"])
    changed["properties"]["size"] = {"type": "string"}
    return changed


def _any_videos() -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"]["VideoListResource"])
    changed["properties"]["data"]["items"] = _any_video()
    return changed


def _any_batch() -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"]["Batch"])
    needed = changed["required"]
    changed["properties"] = {
        name: found if name in needed else {"anyOf": [found, _NULL]}
        for name, found in changed["properties"].items()
    }
    return changed


def _any_batches() -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"]["ListBatchesResponse"])
    changed["properties"]["data"]["items"] = _any_batch()
    for name in ("first_id", "last_id"):  # of an empty page
        changed["properties"][name] = {"anyOf": [changed["properties"][name], _NULL]}
    return changed


def _any_items() -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(SCHEMAS["$defs"]["ConversationItemList"])
    for name in ("first_id", "last_id"):  # of an empty page
        changed["properties"][name] = {"anyOf": [changed["properties"][name], _NULL]}
    return changed


AS_SERVED: Final[dict[str, Any]] = {
    CONVERSATION_ITEMS: _any_items(),
    BATCH: _any_batch(),
    BATCH_LIST: _any_batches(),
    VIDEO: _any_video(),
    VIDEO_LIST: _any_videos(),
    COMPLETION_CHUNK: _chunk(),
    ECHOED: _echoed(),
    **{name: _any_size(name) for name in (IMAGES, *IMAGE_EVENTS.values())},
}
_DEFS: Final = SCHEMAS["$defs"] | AS_SERVED
_VALIDATORS: Final = {
    name: Draft202012Validator({"$defs": _DEFS, "$ref": f"#/$defs/{name.replace(' ', '%20')}"})
    for name in (
        CHAT,
        CHAT_CHUNK,
        COMPLETION,
        COMPLETION_CHUNK,
        ECHOED,
        ERROR,
        MODELS,
        MODEL,
        *SPEECH.values(),
        IMAGES,
        *IMAGE_EVENTS.values(),
        VIDEO,
        VIDEO_LIST,
        DELETED_VIDEO,
        BATCH,
        BATCH_LIST,
        RESPONSE,
        CONVERSATION,
        CONVERSATION_ITEMS,
        DELETED_CONVERSATION,
        *RESPONSE_EVENTS.values(),
        RESPONSE_ITEMS,
    )
}


def check(name: str, body: object) -> None:
    """Check a body against a schema.

    Raises:
        AssertionError: it does not match; the message has the place.
    """
    COUNTS[name] += 1
    errors = [f"{error.json_path}: {error.message}" for error in _VALIDATORS[name].iter_errors(body)]
    assert not errors, f"{name}: {errors}\n{body}"


def check_response(response: httpx.Response) -> None:
    """Check a response against OpenAI's schema: a document, every event of a stream, or an error."""
    path = response.request.url.path
    if path.startswith(OLLAMA):
        return
    if response.status_code >= 400:
        ERROR_STATUSES[response.status_code] += 1
        if response.request.method == "HEAD":
            return
        check(ERROR, response.json())
        return
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    match path:
        case "/v1/chat/completions" if is_stream:
            _check_events(response, CHAT_CHUNK)
        case "/v1/completions" if is_stream:
            _check_events(response, COMPLETION_CHUNK)
        case "/v1/chat/completions":
            check(CHAT, response.json())
        case "/v1/completions":
            asked = json.loads(response.request.content)
            has_null = asked.get("echo") and asked.get("logprobs") is not None
            check(ECHOED if has_null else COMPLETION, response.json())
        case "/v1/audio/speech" if is_stream:
            for line in response.text.split():
                if line != "data:" and line.startswith("{"):
                    body = json.loads(line)
                    check(ERROR if "error" in body else SPEECH[body["type"]], body)
        case "/v1/images/generations" | "/v1/images/edits" if is_stream:
            for line in response.text.splitlines():
                if line.startswith("data: "):
                    body = json.loads(line.removeprefix("data: "))
                    check(ERROR if "error" in body else IMAGE_EVENTS[body["type"]], body)
        case "/v1/images/generations" | "/v1/images/edits" | "/v1/images/variations":
            check(IMAGES, response.json())
        case "/v1/videos" if response.request.method == "GET":
            check(VIDEO_LIST, response.json())
        case "/v1/videos":
            check(VIDEO, response.json())
        case _ if (
            path.startswith("/v1/videos/") and path.count("/") == 3 and path != "/v1/videos/generations"
        ):
            is_deletion = response.request.method == "DELETE"
            check(DELETED_VIDEO if is_deletion else VIDEO, response.json())
        case _ if path.startswith("/v1/responses"):
            _check_answer_of_responses(response, is_stream=is_stream)
        case _ if path.startswith("/v1/conversations"):
            _check_conversation(response)
        case "/v1/batches" if response.request.method == "GET":
            check(BATCH_LIST, response.json())
        case _ if path.startswith("/v1/batches"):
            check(BATCH, response.json())
        case "/v1/models":
            check(MODELS, response.json())
        case _ if path.startswith("/v1/models/"):
            check(MODEL, response.json())
        case _:
            pass  # a route that is not OpenAI's


def _check_conversation(response: httpx.Response) -> None:
    path, method = response.request.url.path, response.request.method
    if path.endswith("/items"):
        check(CONVERSATION_ITEMS, response.json())
    elif "/items/" in path and method == "GET":
        check(CONVERSATION_ITEMS, {
            "object": "list", "data": [response.json()], "has_more": False, "first_id": "a", "last_id": "a",
        })  # fmt: skip
    elif method == "DELETE" and "/items/" not in path:
        check(DELETED_CONVERSATION, response.json())
    else:
        check(CONVERSATION, response.json())


def _check_answer_of_responses(response: httpx.Response, *, is_stream: bool) -> None:
    path = response.request.url.path
    if is_stream:
        for line in response.text.splitlines():
            if line.startswith("data: "):
                body = json.loads(line.removeprefix("data: "))
                check(RESPONSE_EVENTS[body["type"]], body)
    elif path.endswith("/input_items"):
        check(RESPONSE_ITEMS, response.json())
    elif not path.endswith("/input_tokens") and response.request.method != "DELETE":
        check(RESPONSE, response.json())


def _check_events(response: httpx.Response, name: str) -> None:
    for line in response.text.splitlines():
        data = line.removeprefix("data: ")
        if data in (line, "[DONE]"):
            continue
        body = json.loads(data)
        check(ERROR if "error" in body else name, body)


async def check_read(response: httpx.Response) -> None:
    """`check_response` as a hook of `httpx.AsyncClient`; it reads the response first."""
    await response.aread()
    if response.request.method == "OPTIONS":
        return  # a preflight has no body of ours
    if response.status_code != 503 or not response.request.url.path.startswith("/health"):
        check_response(response)
