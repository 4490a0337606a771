"""The entry of a role: logs, event loop, signals, exit status. It decides nothing.

SIGTERM and Ctrl-C cancel the role, which stops in its own order (a gateway finishes its streams); a
second one ends it at once. Exit statuses:

    0    told to stop, and did
    1    something it needs is missing now, and may come: the log cannot be reached, the port is taken
    70   a bug; the traceback says where
    78   it will never run as it was told to: an unknown model, a checkpoint it cannot serve, a library
         that is not installed
    130  told twice
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from configs.deployment import ConfigError, DeploymentConfig
from configs.nats_access import nats_credentials
from dalsegno.config import environment, resolve
from dalsegno.config.layers import Setting
from dalsegno.exit_status import EX_CONFIG, EX_INTERRUPTED, EX_SOFTWARE, EX_UNAVAILABLE
from dalsegno.roles import gc_tuning, logging_setup, parent_watch
from dalsegno.roles.signal_echo import SignalEcho
from shared import faults
from shared.errors import BugError, ClientError, DalSegnoError
from shared.telemetry import timeline, tracing

Role: TypeAlias = Coroutine[Any, Any, None]
"""What a plane's composition root returns: it runs until it is cancelled."""

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """What every role is told.

    Attributes:
        model: a name in `configs/`, a YAML file, or a checkpoint folder.
        settings: configuration keys set by flags.
        parent: the launcher's process; None for a role that stands alone.
        profile_parts: the folder for its part of a profile, if there is to be one.
    """

    model: str
    settings: Sequence[Setting]
    parent: int | None
    profile_parts: Path | None = None


def gateway(options: RoleOptions) -> int:
    """Run a gateway until told to stop; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        _reach(options, config, "gateway")
        from gateway import app

        return app.run(app.GatewayOptions(**_common(config, "gateway")))

    return _enter("gateway", options, compose)


def conductor(options: RoleOptions, *, alone: bool = False) -> int:
    """Run a conductor until told to stop; return the exit status. `alone`: no other can lead."""

    def compose(config: DeploymentConfig) -> Role:
        _reach(options, config, "conductor")
        from conductor import process

        return process.run(process.ConductorOptions(**_common(config, "conductor"), alone=alone))

    return _enter("conductor", options, compose)


def worker(options: RoleOptions, rank: int) -> int:
    """Run the worker of one rank until told to stop; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        if rank not in config.ranks:
            raise ConfigError(f"rank {rank} is none of {config.name}'s: expected one of {config.ranks}")
        _reach(options, config, name)
        from workers import process

        return process.run(process.WorkerOptions(**_common(config, name), rank=rank))

    name = f"worker-{rank}"
    return _enter(name, options, compose)


def _enter(name: str, options: RoleOptions, compose: Callable[[DeploymentConfig], Role]) -> int:
    if options.parent is not None:
        parent_watch.die_with(options.parent)

    def begin() -> Role:
        config = resolve.effective(options.model, options.settings).config
        # The launcher puts the name before every line that is for people; a program's has it inside.
        is_named = options.parent is None or config.logs.format == "json"
        logging_setup.set_up(config.logs, role=name if is_named else None)
        tracing.set_up(config.traces, name)
        timeline.set_up(options.profile_parts, name)
        if (file := environment.read().fault) is not None:
            faults.arm(file)
        return compose(config)

    with gc_tuning.collected_seldom():
        try:
            return run(begin)
        finally:
            tracing.shut_down()
            timeline.shut_down()


def _common(config: DeploymentConfig, role: str) -> dict[str, Any]:
    return {
        "config": config,
        "nats_url": resolve.nats_url(config),
        "credentials": nats_credentials(config.nats, role),
        "prefix": config.nats.prefix,
    }


def _reach(options: RoleOptions, config: DeploymentConfig, role: str) -> None:
    """Raise what is wrong with the log's address, credentials or stream.

    Later a role waits for a log that is away; at its own start that is most often a mistake, and told at
    once. Not under the launcher, which makes the stream while the roles start.
    """
    if options.parent is not None:
        return
    from shared.log.nats import jetstream
    from shared.log.nats.durability import PROMISES
    from shared.subjects import Subjects

    url, credentials = resolve.nats_url(config), nats_credentials(config.nats, role)
    subjects = Subjects(config.nats.prefix)

    async def come_and_go() -> None:
        log = await jetstream.connect(
            url,
            credentials=credentials,
            subjects=subjects,
            name="dalsegno",
            durability=config.nats.durability,
        )
        _LOGGER.info("durability %s: %s", log.durability, PROMISES[log.durability])
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
        echo = SignalEcho()

        def tell(number: signal.Signals) -> None:
            nonlocal told
            if echo.heard():
                return
            if told:
                os._exit(EX_INTERRUPTED)
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
    if not name or name in logging_setup.OURS:
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
    logging_setup.last_word(f"Error: {error.message}")
    return EX_CONFIG if isinstance(error, ClientError) else EX_UNAVAILABLE
