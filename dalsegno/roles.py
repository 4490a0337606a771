"""The entry of a role: logs, event loop, signals, exit status. It decides nothing.

SIGTERM and Ctrl-C cancel the role, which stops in its own order (a gateway finishes its streams); a
second one ends it at once. Exit statuses:

    0    told to stop, and did
    1    something it needs is missing now, and may come: the log cannot be reached
    70   a bug; the traceback says where
    78   it will never run as it was told to: an unknown model, a checkpoint it cannot serve, a library
         that is not installed
    130  told twice
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from dalsegno import environment, garbage, lifeline, logs
from dalsegno.signals import Echo
from dalsegno.supervisor import EX_CONFIG
from shared.config import ConfigError, DeploymentConfig, resolve
from shared.errors import BugError, ClientError, DalSegnoError

EX_UNAVAILABLE: Final = 1
EX_SOFTWARE: Final = 70
EX_TOLD_TWICE: Final = 130

_OURS: Final = frozenset({"conductor", "configs", "dalsegno", "gateway", "shared", "workers"})

Role: TypeAlias = Coroutine[Any, Any, None]
"""What a plane's composition root returns: it runs until it is cancelled."""

_LOGGER: Final = logging.getLogger(__name__)


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
    """Run a gateway until told to stop; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        _reach(options)
        from gateway import app

        return app.run(app.GatewayOptions(**_common(options), config=config, host=host, port=port))

    return _enter("gateway", options, model, compose)


def conductor(options: RoleOptions, model: str) -> int:
    """Run a conductor until told to stop; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        _reach(options)
        from conductor import process

        return process.run(process.ConductorOptions(**_common(options), config=config))

    return _enter("conductor", options, model, compose)


def worker(options: RoleOptions, model: str, rank: int) -> int:
    """Run the worker of one rank until told to stop; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        if rank not in config.ranks:
            raise ConfigError(f"rank {rank} is none of {config.name}'s: expected one of {config.ranks}")
        _reach(options)
        from workers import process

        return process.run(process.WorkerOptions(**_common(options), config=config, rank=rank))

    return _enter(f"worker-{rank}", options, model, compose)


def _enter(name: str, options: RoleOptions, model: str, compose: Callable[[DeploymentConfig], Role]) -> int:
    if options.parent is not None:
        lifeline.die_with(options.parent)
    logs.set_up(options.log_level, role=None if options.parent is not None else name)

    with garbage.collected_seldom():
        return run(lambda: compose(resolve(model)))


def _common(options: RoleOptions) -> dict[str, Any]:
    return {
        "nats_url": options.nats,
        "nats_token": environment.read().nats_token,
        "prefix": options.prefix,
    }


def _reach(options: RoleOptions) -> None:
    """Raise what is wrong with the log's address, token or stream.

    Later a role waits for a log that is away; at its own start that is most often a mistake, and told at
    once. Not under the launcher, which makes the stream while the roles start.
    """
    if options.parent is not None:
        return
    from shared.log import jetstream
    from shared.subjects import Subjects

    async def come_and_go() -> None:
        token = environment.read().nats_token
        log = await jetstream.connect(
            options.nats, token=token, subjects=Subjects(options.prefix), name="dalsegno"
        )
        await log.close()

    asyncio.run(come_and_go())


def run(compose: Callable[[], Role]) -> int:
    """Make a role and run it to its end; return the exit status."""
    try:
        role = compose()
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_told(role))
    except Exception as error:  # noqa: BLE001 - the outermost loop of a process: say it and end
        return _judge(error)
    return 0


async def until_told(role: Role) -> None:
    """Run `role` until it ends, or until SIGTERM or SIGINT cancels it."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(role)
        told = False
        echo = Echo()

        def tell(number: signal.Signals) -> None:
            nonlocal told
            if echo.heard():
                return
            if told:
                os._exit(EX_TOLD_TWICE)
            told = True
            _LOGGER.info("stopping: %s", number.name)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, tell, number)


def _judge(error: Exception) -> int:
    """Say what ended a role; return its exit status."""
    leaves = [_as_told(leaf) for leaf in _leaves(error)]
    expected = [leaf for leaf in leaves if isinstance(leaf, DalSegnoError) and not isinstance(leaf, BugError)]
    if len(expected) < len(leaves):
        _LOGGER.critical("a bug ended this process", exc_info=error)
        return EX_SOFTWARE
    refusals = [leaf for leaf in expected if isinstance(leaf, ClientError)]
    return _refuse((refusals or expected)[0])


def _as_told(error: BaseException) -> BaseException:
    """A library that is not installed is no bug: each role has an extra of its own."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or name in _OURS:
        return error
    return ClientError(f"{name} is not installed, and this role needs it: pip install 'dalsegno[all]'")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, however deep; of a plain error, itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _refuse(error: DalSegnoError) -> int:
    print(f"Error: {error.message}", file=sys.stderr)
    return EX_CONFIG if isinstance(error, ClientError) else EX_UNAVAILABLE
