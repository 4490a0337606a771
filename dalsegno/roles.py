"""The entry of a role: logs, event loop, signals, exit status. It decides nothing.

SIGTERM and Ctrl-C cancel the role, which stops in its own order (a gateway finishes its streams); a
second one ends it at once. Exit statuses:

    0    told to stop, and did
    1    something it needs is missing now, and may come: the log cannot be reached
    70   a bug; the traceback says where
    78   it will never run as it was told to: an unknown model, a checkpoint it cannot serve
    130  told twice
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final

from dalsegno import environment, lifeline, logs
from dalsegno.supervisor import EX_CONFIG
from shared.errors import ClientError, DalSegnoError

EX_SOFTWARE: Final = 70
EX_TOLD_TWICE: Final = 130

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """What every role is told.

    Attributes:
        parent: the launcher's process; None for a role that stands alone.
    """

    nats: str
    prefix: str
    log_level: str
    parent: int | None


def gateway(options: RoleOptions, model: str, host: str, port: int) -> int:
    """Run a gateway until told to stop."""
    _begin("gateway", options)
    try:
        from gateway.app import GatewayOptions, run
        from shared.config import resolve

        role = GatewayOptions(**_common(options), config=resolve(model), host=host, port=port)
        return _run("gateway", run(role))
    except DalSegnoError as error:
        return _refuse("gateway", error)


def conductor(options: RoleOptions, model: str) -> int:
    """Run a conductor until told to stop."""
    _begin("conductor", options)
    try:
        from conductor.process import ConductorOptions, run
        from shared.config import resolve

        return _run("conductor", run(ConductorOptions(**_common(options), config=resolve(model))))
    except DalSegnoError as error:
        return _refuse("conductor", error)


def worker(options: RoleOptions, model: str, rank: int) -> int:
    """Run the worker of one rank until told to stop."""
    name = f"worker-{rank}"
    _begin(name, options)
    try:
        from shared.config import resolve
        from workers.process import WorkerOptions, run

        return _run(name, run(WorkerOptions(**_common(options), config=resolve(model), rank=rank)))
    except DalSegnoError as error:
        return _refuse(name, error)


def _begin(name: str, options: RoleOptions) -> None:
    if options.parent is not None:
        lifeline.die_with(options.parent)
    logs.set_up(options.log_level, role=None if options.parent else name)


def _common(options: RoleOptions) -> dict[str, Any]:
    return {
        "nats_url": options.nats,
        "nats_token": environment.read().nats_token,
        "prefix": options.prefix,
    }


def _run(name: str, role: Coroutine[Any, Any, None]) -> int:
    """Run a role's coroutine to its end; return the exit status."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_told(role))
    except Exception as error:  # noqa: BLE001 - the outermost loop of a process: say it and end
        return _judge(name, error)
    return 0


async def until_told(role: Coroutine[Any, Any, None]) -> None:
    """Run `role` until it ends, or until SIGTERM or SIGINT cancels it."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(role)
        told = False

        def tell(number: signal.Signals) -> None:
            nonlocal told
            if told:
                os._exit(EX_TOLD_TWICE)
            told = True
            log.info("stopping: %s", number.name)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, tell, number)


def _judge(name: str, error: Exception) -> int:
    """Say what ended a role; return its exit status."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, ClientError):
            return _refuse(name, leaf)
    known = [leaf for leaf in leaves if isinstance(leaf, DalSegnoError)]
    if known and len(known) == len(leaves):
        return _refuse(name, known[0])
    log.critical("a bug ended this process", exc_info=error)
    return EX_SOFTWARE


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group, however deep; of a plain error, itself."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _refuse(name: str, error: DalSegnoError) -> int:
    print(error.message, file=sys.stderr)
    return EX_CONFIG if isinstance(error, ClientError) else 1
