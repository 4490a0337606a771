"""What each role may say and hear on a NATS server: what it needs, and no more. Pure.

The writer is a token of every subject (`shared.subjects`), so a server can hold a role to its own. What is
not granted is denied:

    provisioner    makes and changes the stream; nobody else does, and it writes no event
    conductor      what is decided, and fences
    worker-<rank>  what that rank reports, and its own output
    gateway        requests, and what is asked of them
    client         the same: any service; `client-<name>` where each has a key of its own
    reader         nothing: it replays

**Nobody is granted `$JS.API.>`**: who reads has the five questions that reading takes. Reading is not
divided: who may read the log may read all of it.

The server's answer goes to whatever subject the asker names, also one that it may not write to. What is
granted here is answered in the server's own words, which are no event on any subject. **Not** granted is
what is answered with what is stored: past the leader (`DIRECT.GET`), whoever may write one subject could
have it written to any other; from a pull consumer (`CONSUMER.MSG.NEXT`), old events could be put behind
newer ones. A push consumer delivers to no subject of its own stream, and elsewhere only to who listens by
the very name.
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
    """The role of a service that has a key of its own."""
    return f"client-{name}"


def permissions(role: str, subjects: Subjects, inbox_prefix: str) -> Permissions:
    """What `role` may do; answers to it come to subjects behind `inbox_prefix`, which are its own.

    Raises:
        ValueError: there is no such role.
    """
    if role == PROVISIONER:
        return Permissions(publish=_managing(subjects.stream), subscribe=[f"{inbox_prefix}.>"])
    published = [*_written(role, subjects), *_reading(subjects.stream)]
    if role == READER or _is_client(role):
        published += _reading_of_others(subjects.stream)
    return Permissions(publish=published, subscribe=[f"{inbox_prefix}.>", *_heard(role, subjects)])


def authorization(roles: Mapping[str, Credentials], subjects: Subjects) -> str:
    """The block of a server's configuration that lets `roles` in, each with its permissions.

    It holds the public nkeys, but of a role that shows a password, that: keep it private then.

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
    return json.dumps(who | {"permissions": allowed})  # the configuration's strings escape as JSON's do


def _is_client(role: str) -> bool:
    return role == CLIENT or _NAMED_CLIENT.fullmatch(role) is not None


def _written(role: str, subjects: Subjects) -> list[str]:
    """The subjects a role writes, in the log and beside it."""
    if role == READER:
        return []
    if role == GATEWAY or _is_client(role):
        return [subjects.request("*"), subjects.control("*")]
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
        f"{role!r} is no role: expected {PROVISIONER}, {CONDUCTOR}, {GATEWAY}, {READER}, {CLIENT}, "
        "client-<name> or worker-<rank>"
    )


def _heard(role: str, subjects: Subjects) -> list[str]:
    """What a role listens to beside the log."""
    if role == READER:
        return [f"{subjects.prefix}.>"]
    if _is_client(role):
        # A service of another's making listens plainly, and for answers where NATS' clients do by default:
        # no role of ours does there.
        plain = [subjects.walk("*"), subjects.output("*", "*", "*"), subjects.conductor("*")]
        return ["_INBOX.>", *plain, subjects.worker_any(), subjects.heartbeats()]
    return [subjects.heartbeats()] if role in {CONDUCTOR, GATEWAY} else []


def _managing(stream: str) -> list[str]:
    return [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("CREATE", "UPDATE", "INFO", "DELETE")]


def _reading(stream: str) -> list[str]:
    """What it takes to read: what there is, one event of it, consumers, and their flow control."""
    return [
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.*",
        f"$JS.API.CONSUMER.DELETE.{stream}.*",
        f"$JS.FC.{stream}.>",
    ]


def _reading_of_others(stream: str) -> list[str]:
    """What NATS' own clients ask besides, for the same: their consumers have no name, or a filter in it."""
    return [
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.*.>",
        f"$JS.API.CONSUMER.INFO.{stream}.*",
    ]
