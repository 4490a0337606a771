"""A deployment's events match docs/asyncapi.yaml: every event, on its channel, by its schema."""

from base64 import b64encode
from contextlib import aclosing
from typing import Any, Final

import msgpack
import yaml
from jsonschema import Draft202012Validator

from dalsegno import AsyncClient, DalSegnoError
from tests.e2e import clients
from tests.e2e.deploy import Running

DOCUMENT: Final = yaml.safe_load((clients.ROOT / "docs" / "asyncapi.yaml").read_text(encoding="utf-8"))
_SERVED: Final = {
    "epoch.opened.v1", "node.ready.v1", "output.chunk.v1", "request.admitted.v1", "request.cancel.v1",
    "request.cancelled.v1", "request.failed.v1", "request.finished.v1", "request.rejected.v1",
    "request.submitted.v1", "walk.completed.v1", "walk.failed.v1", "walk.stop.v1", "walk.stopped.v1",
    "worker.joined.v1",
}  # fmt: skip


def plain(value: Any) -> Any:
    """MessagePack bytes in the schema's form."""
    match value:
        case bytes():
            return b64encode(value).decode()
        case dict():
            return {name: plain(inner) for name, inner in value.items()}
        case list():
            return [plain(inner) for inner in value]
        case _:
            return value


def messages(channel: str) -> dict[str, Draft202012Validator]:
    """The validators of a channel's messages, by event tag."""
    found = {}
    for reference in DOCUMENT["channels"][channel]["messages"].values():
        message = DOCUMENT["components"]["messages"][reference["$ref"].rpartition("/")[2]]
        found[message["title"]] = Draft202012Validator({**DOCUMENT, **message["payload"]})
    return found


async def everything_happens(running: Running) -> None:
    """An answer with all features, a cancel, a failure and a rejection."""
    async with AsyncClient(running.nats_url, credentials=running.client, prefix=running.prefix) as client:
        await client.generate("hi", max_tokens=3, logprobs=2, echo=True, request_id="asyncapi-1")
        stream = client.stream("hi", max_tokens=400, ignore_eos=True)
        await anext(stream)
        await client.cancel(stream.request_id)
        for wrong in (stream.read(), client.generate("hi " * 9000), client.generate("hi", model="none")):
            try:
                await wrong
            except DalSegnoError:
                continue
            raise AssertionError("this was not to be answered")
    async with AsyncClient(running.url) as client:
        await client.chat("hi", max_tokens=3)


async def test_every_event_of_a_served_log_is_as_the_document_says(random_deployment: Running) -> None:
    running, seen = random_deployment, set()
    async with clients.reader(running) as reader:
        begun_at = (await reader.log.state()).last_seq + 1  # what stands before, others wrote as they liked
        await everything_happens(running)
        for subjects, first_seq in ((["ds.worker.*", "ds.conductor.*"], 1), (["ds.>"], begun_at)):
            async with aclosing(reader.log.history(subjects, first_seq)) as records:
                async for record in records:
                    address = reader.subjects.parse(record.subject)
                    assert address is not None
                    event = plain(msgpack.unpackb(record.data))
                    messages(address.kind)[event["type"]].validate(event)
                    seen.add(event["type"])

    assert seen >= _SERVED
