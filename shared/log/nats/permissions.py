"""The NATS permissions of each role: the subjects that it needs, and no others. Pure.

The writer is a token of every subject (`shared.subjects`), so a server can restrict each role to its own
subjects. Everything that is not granted is denied. The roles publish:

    provisioner    the creation and changes of the streams, which no other role may make; no events
    conductor      decisions and fences; it may list all readers, to limit those of each key
    worker-<rank>  that rank's reports and output
    gateway        requests, cancels, adapters, refusals, batches, conversations, media, which it may delete
    client         requests, cancels and media, for any service; `client-<name>` for one with its own key
    reader         nothing: it replays

**No role is granted `$JS.API.>`**: a reader is granted the five API subjects that reading needs. Read
access is not divided: a role that may read the log may read all of it.

The server sends its reply to the subject that the requester names, even one that the requester may not
publish to. Replies to the granted requests are the server's own messages, which are not events on any
subject. Requests whose replies contain stored data are **not** granted: by `DIRECT.GET` a role could have
its stored bytes written to any subject, and by a pull consumer (`CONSUMER.MSG.NEXT`) it could have old
events stored after newer ones. A push consumer cannot deliver to a subject of its stream, and elsewhere only
to a subscriber of the exact subject.

**Of the stream of media only `STREAM.MSG.GET` is granted, and no consumer**: its bytes are written by
clients, and a consumer of one stream could deliver them to subjects of the other (ADR 30). The conductor may
not read media.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shared.log.nats.credentials import Credentials
from shared.subjects import CONDUCTOR_WRITER, Subjects, worker_writer

PROVISIONER: Final = "provisioner"
CONDUCTOR: Final = "conductor"
GATEWAY: Final = "gateway"
READER: Final = "reader"
CLIENT: Final = "client"
_WORKER: Final = re.compile(r"worker-(0|[1-9][0-9]*)")
_NAMED_CLIENT: Final = re.compile(r"client-[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """The subjects a role may publish and subscribe to, as NATS writes them."""

    publish: list[str]
    subscribe: list[str]


def worker(rank: int) -> str:
    """The role of one rank's worker."""
    return f"worker-{rank}"


def named_client(name: str) -> str:
    """The role of a service with its own key."""
    return f"client-{name}"


def permissions(role: str, subjects: Subjects, inbox_prefix: str) -> Permissions:
    """Return the permissions of `role`, whose replies arrive on subjects under its own `inbox_prefix`.

    Raises:
        ValueError: there is no such role.
    """
    if role == PROVISIONER:
        streams = (subjects.stream, subjects.media_stream)
        managing = [subject for stream in streams for subject in _managing(stream)]
        return Permissions(publish=managing, subscribe=[f"{inbox_prefix}.>"])
    published = [*_written(role, subjects), *_reading(subjects.stream)]
    if role != CONDUCTOR:
        published += _reading_media(subjects.media_stream)
    if role == GATEWAY:
        published.append(f"$JS.API.STREAM.PURGE.{subjects.media_stream}")
    if role == CONDUCTOR:
        published.append(f"$JS.API.CONSUMER.LIST.{subjects.stream}")
    if role == READER or _is_client(role):
        published += _reading_by_other_clients(subjects.stream)
    return Permissions(publish=published, subscribe=[f"{inbox_prefix}.>", *_subscribed(role, subjects)])


def authorization(roles: Mapping[str, Credentials], subjects: Subjects) -> str:
    """Return the block of a server's configuration that authorizes `roles`, each with its permissions.

    It contains public nkeys, and the passwords of roles that use one: then it has to stay private.

    Raises:
        ValueError: there is no such role.
    """
    users = "".join(f"    # {role}\n    {_user(role, shown, subjects)}\n" for role, shown in roles.items())
    return f"authorization {{\n  users: [\n{users}  ]\n}}"


def _user(role: str, shown: Credentials, subjects: Subjects) -> str:
    who: dict[str, Any] = {"user": shown.user, "password": shown.password}
    if shown.public_key is not None:
        who = {"nkey": shown.public_key}
    may = permissions(role, subjects, shown.inbox_prefix)
    allowed = {"publish": {"allow": may.publish}, "subscribe": {"allow": may.subscribe}}
    return json.dumps(who | {"permissions": allowed})  # the configuration escapes strings as JSON does


def _is_client(role: str) -> bool:
    return role == CLIENT or _NAMED_CLIENT.fullmatch(role) is not None


def _written(role: str, subjects: Subjects) -> list[str]:
    """The subjects that a role publishes on: events and heartbeats."""
    if role == READER:
        return []
    if role == GATEWAY or _is_client(role):
        public = [subjects.request("*"), subjects.control("*"), subjects.medium("*", "*", "*")]
        own = [
            subjects.adapter("*"),
            subjects.refused("*"),
            subjects.batch("*"),
            subjects.conversation("*"),
            subjects.heartbeat("batch", "*"),
        ]
        return [*public, *own] if role == GATEWAY else public
    if role == CONDUCTOR:
        return [
            subjects.conductor("*"),
            subjects.walk("*"),
            subjects.ready("*", "*"),
            subjects.output("*", "*", CONDUCTOR_WRITER),
            subjects.heartbeat("conductor", "*"),
        ]
    if (found := _WORKER.fullmatch(role)) is not None:
        rank = int(found[1])
        return [
            subjects.done(rank, "*"),
            subjects.edge("*", rank, "*"),
            subjects.worker(rank),
            subjects.output("*", "*", worker_writer(rank)),
            subjects.heartbeat("worker", str(rank)),
        ]
    raise ValueError(
        f"unknown role {role!r}: expected {PROVISIONER}, {CONDUCTOR}, {GATEWAY}, {READER}, {CLIENT}, "
        "client-<name> or worker-<rank>"
    )


def _subscribed(role: str, subjects: Subjects) -> list[str]:
    """The subjects that a role subscribes to directly, in addition to its reading of the log."""
    if role == READER:
        return [f"{subjects.prefix}.>"]
    if _is_client(role):
        # Other services may subscribe without JetStream, and receive replies under NATS' default inbox, which
        # our own roles do not use.
        plain = [subjects.walk("*"), subjects.output("*", "*", "*"), subjects.conductor("*")]
        return ["_INBOX.>", *plain, subjects.worker_any(), subjects.heartbeats()]
    return [subjects.heartbeats()] if role in {CONDUCTOR, GATEWAY} else []


def _managing(stream: str) -> list[str]:
    return [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "INFO", "DELETE")]


def _reading(stream: str) -> list[str]:
    """The API subjects for reading: the stream's info, one event, consumers, and their flow control."""
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.FC.{stream}.>",
    ]


def _reading_media(stream: str) -> list[str]:
    """The API subjects for reading media: the stream's info, and one piece. A consumer could forge events."""
    return [f"$JS.API.STREAM.INFO.{stream}", f"$JS.API.STREAM.MSG.GET.{stream}"]


def _reading_by_other_clients(stream: str) -> list[str]:
    """The additional API subjects of NATS' own clients: for consumers without a name, or with a filter."""
    return [
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.*.>",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
    ]
