"""Generator of docs/asyncapi.yaml: the log's contract as an AsyncAPI 3 document.

    $ python -m dalsegno.asyncapi docs/asyncapi.yaml

Channels are the subjects of `shared.subjects`; messages are the events of `shared.events`, described by their
docstrings. This module adds each channel's writers and readers: an operation belongs to a role and is named
`<role>.<action>.<channel>`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from inspect import cleandoc
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import msgspec
import yaml

from shared import adapters, events, tensors
from shared.docstrings import meanings_of
from shared.events import Event
from shared.subjects import DEFAULT_ORIGIN, Subjects

EventType: TypeAlias = type[Event]

_SUBJECTS: Final = Subjects("{prefix}")
_PACKED: Final = "application/msgpack"
_JSON: Final = "application/json"
_PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "prefix": {"default": "ds", "description": "The deployment's prefix: a token of lower-case letters."},
    "request_id": {"description": "Chosen by the client: 1 to 64 letters, digits, `_` or `-`."},
    "origin": {
        "default": DEFAULT_ORIGIN,
        "description": "The origin that the request names: a gateway's name, or a service's.",
    },
    "writer": {
        "description": "`w<rank>` for a worker, `conductor` for fences.",
        "examples": ["w0", "conductor"],
    },
    "rank": {"description": "The worker's rank.", "examples": ["0"]},
    "to_rank": {"description": "The receiving rank.", "examples": ["1"]},
    "from_rank": {"description": "The sending rank.", "examples": ["0"]},
    "kind": {
        "enum": ["epoch", "lost"],
        "description": "An epoch begins, or a worker's incarnation is declared lost.",
    },
    "gateway": {"description": "The name of a gateway's process.", "examples": ["g-1f0a2b3c"]},
    "batch_id": {"description": "The id of a batch.", "examples": ["batch-692e0a4d-1f0a2b3c4d5e6f70"]},
    "conversation_id": {
        "description": "The id of a conversation.",
        "examples": ["conv-692e0a4d-1f0a2b3c4d5e6f70"],
    },
    "role": {"enum": ["worker", "conductor"], "description": "The role that sends the heartbeat."},
    "name": {"description": "A worker's rank, a conductor's name.", "examples": ["0", "c-1f0a2b3c"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A family of subjects, with the events that each role writes there, and its readers.

    Anybody may write to a public channel, in JSON too.
    """

    name: str
    address: str
    summary: str
    writers: dict[str, Sequence[EventType]]
    readers: Sequence[str]
    is_public: bool = False

    @property
    def kinds(self) -> list[EventType]:
        """The events written there, each once."""
        return list(dict.fromkeys(kind for kinds in self.writers.values() for kind in kinds))


CHANNELS: Final = (
    Channel(
        name="request",
        address=_SUBJECTS.request("{request_id}"),
        summary="Requests. An acked request is stored; one id is executed once.",
        writers={role: [events.RequestSubmitted] for role in ("service", "gateway")},
        readers=["conductor", "gateway"],
        is_public=True,
    ),
    Channel(
        name="control",
        address=_SUBJECTS.control("{request_id}"),
        summary="Cancels, and reader notices. The position in the log decides if a cancel was in time.",
        writers={"service": [events.RequestCancel], "gateway": [events.RequestCancel, events.RequestWatched]},
        readers=["conductor", "gateway"],
        is_public=True,
    ),
    Channel(
        name="walk",
        address=_SUBJECTS.walk("{request_id}"),
        summary="The states of a request: admitted or rejected, held, resumed, and its end.",
        writers={
            "conductor": [
                events.RequestAdmitted,
                events.RequestRejected,
                events.RequestResumed,
                events.DeadlinePassed,
                events.RequestFinished,
                events.RequestFailed,
                events.RequestCancelled,
            ]
        },
        readers=["service", "gateway", "conductor", "worker"],
    ),
    Channel(
        name="output",
        address=_SUBJECTS.output("{origin}", "{request_id}", "{writer}"),
        summary="The answer in chunks, and the fences that void chunks of dead workers.",
        writers={"worker": [events.OutputChunk], "conductor": [events.OutputFence]},
        readers=["service", "gateway", "worker"],
    ),
    Channel(
        name="conductor",
        address=_SUBJECTS.conductor("{kind}"),
        summary="The conductors' epochs, the workers that they declared lost, and seals of the log.",
        writers={"conductor": [events.EpochOpened, events.WorkerLost, events.LogSealed]},
        readers=["service", "gateway", "conductor", "worker"],
    ),
    Channel(
        name="ready",
        address=f"{_SUBJECTS.prefix}.ready.{{rank}}.{{request_id}}",
        summary="Orders to a rank.",
        writers={"conductor": [events.NodeReady, events.WalkStop]},
        readers=["worker", "conductor"],
    ),
    Channel(
        name="done",
        address=f"{_SUBJECTS.prefix}.done.{{rank}}.{{request_id}}",
        summary="The progress and results of a rank's orders.",
        writers={
            "worker": [
                events.WalkBegun,
                events.WalkCompleted,
                events.WalkProgressed,
                events.WalkFailed,
                events.WalkStopped,
            ]
        },
        readers=["conductor"],
    ),
    Channel(
        name="edge",
        address=_SUBJECTS.edge("{to_rank}", "{from_rank}", "{request_id}"),
        summary="Messages between the ranks of a step: node calls, and the progress of streams.",
        writers={"worker": [events.NodeFired, events.StreamSent, events.StreamTaken, events.TensorsReleased]},
        readers=["worker"],
    ),
    Channel(
        name="adapter",
        address=_SUBJECTS.adapter("{name}"),
        summary="LoRA adapters that were loaded and unloaded at run time.",
        writers={"gateway": [events.AdapterLoaded, events.AdapterUnloaded]},
        readers=["gateway", "conductor"],
    ),
    Channel(
        name="refused",
        address=_SUBJECTS.refused("{gateway}"),
        summary="Requests that a gateway refused and did not publish: counts and samples, for people.",
        writers={"gateway": [events.RequestsRefused]},
        readers=["service"],
    ),
    Channel(
        name="batch",
        address=_SUBJECTS.batch("{batch_id}"),
        summary="Batches: files of requests that gateways submit line by line, and their results.",
        writers={"gateway": list(get_args(events.BatchEvent))},
        readers=["gateway"],
    ),
    Channel(
        name="conversation",
        address=_SUBJECTS.conversation("{conversation_id}"),
        summary="Conversations: the items that several responses have in common.",
        writers={"gateway": list(get_args(events.ConversationEvent))},
        readers=["gateway"],
    ),
    Channel(
        name="worker",
        address=f"{_SUBJECTS.prefix}.worker.{{rank}}",
        summary="The incarnations of a rank: joined, leaving.",
        writers={"worker": [events.WorkerJoined, events.WorkerLeaving]},
        readers=["service", "gateway", "conductor", "worker"],
    ),
)
BEAT: Final = "beat"
_BEAT_READERS: Final = ("service", "gateway", "conductor")


class _Plain(yaml.SafeDumper):
    """YAML without anchors: repeated values are written out each time."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def document() -> dict[str, Any]:
    """Return the whole document as plain values."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Dal Segno",
            "version": version("dalsegno"),
            "description": (
                "The event log of a Dal Segno deployment: one JetStream stream. docs/nats.md shows how to "
                "read an answer. Bytes are base64 in JSON and raw in MessagePack; fields with their default "
                "value are left out; readers must ignore unknown fields."
            ),
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": _PACKED,
        "servers": {
            "nats": {
                "host": "127.0.0.1:4222",
                "protocol": "nats",
                "description": "NATS with JetStream; its address is in the deployment's ready file.",
                "security": [
                    {"$ref": "#/components/securitySchemes/user"},
                    {"$ref": "#/components/securitySchemes/key"},
                    {"$ref": "#/components/securitySchemes/token"},
                ],
            }
        },
        "channels": {channel.name: _channel(channel) for channel in CHANNELS} | {BEAT: _beat_channel()},
        "operations": dict(_operations()),
        "components": {
            "messages": dict(_messages()),
            "schemas": _schemas(),
            "parameters": _PARAMETERS,
            "securitySchemes": {
                "user": {
                    "type": "userPassword",
                    "description": "For a private server: `nats_client` in the ready file.",
                },
                "key": {
                    "type": "asymmetricEncryption",
                    "description": "An nkey, for a server with a key per role.",
                },
                "token": {
                    "type": "apiKey",
                    "in": "password",
                    "description": "A NATS token, for a server with one token for all.",
                },
            },
        },
    }


def text() -> str:
    """Return the document as YAML."""
    return yaml.dump(document(), Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)


def _channel(channel: Channel) -> dict[str, Any]:
    return {
        "address": channel.address,
        "summary": channel.summary,
        "parameters": _parameters(channel.address),
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in _names(channel)},
    }


def _beat_channel() -> dict[str, Any]:
    address = _SUBJECTS.heartbeat("{role}", "{name}")
    return {
        "address": address,
        "summary": "Heartbeats, at least twice a second; core NATS, not stored.",
        "parameters": _parameters(address),
        "messages": {"Beat": {"$ref": "#/components/messages/Beat"}},
    }


def _parameters(address: str) -> dict[str, Any]:
    names = [name for name in _PARAMETERS if f"{{{name}}}" in address]
    return {name: {"$ref": f"#/components/parameters/{name}"} for name in names}


def _names(channel: Channel) -> list[str]:
    """The names of a channel's messages; a public channel has a JSON form of each."""
    names = [kind.__name__ for kind in channel.kinds]
    return [*names, *(f"{name}Json" for name in names)] if channel.is_public else names


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for channel in CHANNELS:
        for role, kinds in channel.writers.items():
            names = [name for name in _names(channel) if name.removesuffix("Json") in _called(kinds)]
            yield _operation(role, "send", channel.name, names)
        for role in channel.readers:
            yield _operation(role, "receive", channel.name, _names(channel))
    for role in ("worker", "conductor"):
        yield _operation(role, "send", BEAT, ["Beat"])
    for role in _BEAT_READERS:
        yield _operation(role, "receive", BEAT, ["Beat"])


def _called(kinds: Sequence[EventType]) -> set[str]:
    return {kind.__name__ for kind in kinds}


def _operation(role: str, action: str, channel: str, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    operation = {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "tags": [{"name": role}],
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"} for name in names],
    }
    return f"{role}.{action}.{channel}", operation


def _messages() -> Iterator[tuple[str, dict[str, Any]]]:
    for channel in CHANNELS:
        for name in _names(channel):
            kind = getattr(events, name.removesuffix("Json"))
            yield name, _message(kind, name, _JSON if name.endswith("Json") else _PACKED)
    yield (
        "Beat",
        {"name": "Beat", "contentType": _PACKED, "payload": {"$ref": "#/components/schemas/Beat"}},
    )


def _message(kind: EventType, name: str, content_type: str) -> dict[str, Any]:
    summary, _, _ = cleandoc(kind.__doc__ or "").partition("\n")
    return {
        "name": name,
        "title": str(kind.__struct_config__.tag),
        "summary": summary,
        "contentType": content_type,
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


# ---- payloads ------------------------------------------------------------------------------------------


def _schemas() -> dict[str, Any]:
    kinds = [kind for channel in CHANNELS for kind in channel.kinds]
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    public = {kind.__name__ for channel in CHANNELS if channel.is_public for kind in channel.kinds}
    schemas = {name: _schema(name, found[name], is_public=name in public) for name in sorted(found)}
    state = {"type": "string", "examples": ["loading", "ready", "draining", "following", "leading"]}
    schemas["Beat"] = {
        "title": "Beat",
        "description": "The state of one process, and facts for people.",
        "type": "object",
        "properties": {"state": state, "pid": {"type": "integer"}},
        "required": ["state"],
    }
    return schemas


def _schema(name: str, found: dict[str, Any], *, is_public: bool) -> dict[str, Any]:
    """Return msgspec's schema with a description for each field, and patterns in the common syntax."""
    kind = _kind_of(name)
    about, _, _ = cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")
    meanings = {**meanings_of(Event), **meanings_of(kind)} if issubclass(kind, Event) else meanings_of(kind)
    properties = {
        field: {**({"description": meanings[field]} if field in meanings else {}), **schema}
        for field, schema in found["properties"].items()
    }
    schema = _portable({**found, "description": about, "properties": properties})
    if is_public:  # only one type of event belongs on its subject, so the tag may be left out
        schema["required"] = [field for field in schema["required"] if field != "type"]
    return {key: value for key, value in schema.items() if key != "required" or value}


def _kind_of(name: str) -> Any:
    return next(getattr(one, name) for one in (events, tensors, adapters) if hasattr(one, name))


def _portable(schema: Any) -> Any:
    match schema:
        case dict():
            return {
                key: value.replace(r"\A", "^").replace(r"\Z", "$") if key == "pattern" else _portable(value)
                for key, value in schema.items()
            }
        case list() | tuple():  # a tuple is a default
            return [_portable(one) for one in schema]
        case _:
            return schema


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
