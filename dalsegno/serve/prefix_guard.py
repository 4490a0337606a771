"""Whether a deployment is alive already under a prefix: by its beats, before another one is put beside it.

Two would work on the same requests: their workers depose each other, and both gateways tell half a story.
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
"""Conductors and workers say twice a second that they live."""


class PrefixInUseError(ClientError):
    """Somebody lives under this prefix."""

    code = "prefix_in_use"


async def refuse_running_deployment(
    log: Log, subjects: Subjects, where: str, *, listen_s: float = _LISTEN_S
) -> None:
    """Listen for a while.

    Raises:
        PrefixInUseError: a deployment is alive there.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(listen_s), aclosing(log.listen(subjects.beats())) as beats:
            async for subject, data in beats:
                raise PrefixInUseError(
                    f"a deployment is alive under the prefix {subjects.prefix!r} at {where} "
                    f"({_who(subject, data)}): give this one another with --prefix, or stop that one"
                )


def _who(subject: str, data: bytes) -> str:
    role, _, name = subject.partition(".beat.")[2].partition(".")
    try:
        pid = msgspec.msgpack.decode(data, type=dict[str, Any]).get("pid")
    except msgspec.MsgspecError:
        pid = None
    return f"{role} {name} is heard" if pid is None else f"{role} {name}, process {pid}, is heard"
