"""Check for a running deployment under the same subject prefix, by its heartbeats, before a start.

Two deployments would work on the same requests: their workers depose each other, and each gateway relays only
parts of the answers.
"""

import asyncio
import contextlib
from contextlib import aclosing
from typing import Any, Final

import msgspec

from shared.errors import ClientError
from shared.log.port import Log
from shared.subjects import Subjects

_LISTEN_S: Final = 1.2
"""Seconds to listen; conductors and workers send heartbeats twice a second."""


class PrefixInUseError(ClientError):
    """A deployment is running under this prefix."""

    code = "prefix_in_use"


async def refuse_running_deployment(
    log: Log, subjects: Subjects, where: str, *, listen_s: float = _LISTEN_S
) -> None:
    """Listen for heartbeats for a while.

    Raises:
        PrefixInUseError: a deployment is running there.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(listen_s), aclosing(log.listen(subjects.heartbeats())) as beats:
            async for subject, data in beats:
                raise PrefixInUseError(
                    f"a deployment is running under the prefix {subjects.prefix!r} at {where} "
                    f"({_sender(subject, data)}): give this one another with --prefix, or stop that one"
                )


def _sender(subject: str, data: bytes) -> str:
    role, _, name = subject.partition(".beat.")[2].partition(".")
    try:
        pid = msgspec.msgpack.decode(data, type=dict[str, Any]).get("pid")
    except msgspec.MsgspecError:
        pid = None
    return f"{role} {name}" if pid is None else f"{role} {name}, process {pid}"
