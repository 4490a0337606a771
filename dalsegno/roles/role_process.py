"""Entry point of a role process: logs, event loop, signals, exit status.

SIGTERM and Ctrl-C cancel the role, which stops in its own order (a gateway finishes its streams); a second
signal ends it at once. Exit statuses (`dalsegno.exit_status`):

    0    stopped on request
    1    a dependency is missing now and may return: the log cannot be reached, the port is taken
    70   a bug; the traceback shows where
    78   the configuration can never run: an unknown model, a checkpoint that cannot be served, a library
         that is not installed
    130  a second signal to stop
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
from models import registry
from shared import faults
from shared.errors import BugError, ClientError, DalSegnoError
from shared.telemetry import timeline, tracing

Role: TypeAlias = Coroutine[Any, Any, None]
"""The coroutine that a role's composition root returns: it runs until it is cancelled."""

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOptions:
    """Arguments of every role.

    Attributes:
        model: a name in `configs/`, a YAML file, or a checkpoint folder.
        settings: configuration keys set by flags.
        parent: the launcher's process id; None for a role that was started by hand.
        profile_parts: the folder for this process's part of a profile; None for no profile.
    """

    model: str
    settings: Sequence[Setting]
    parent: int | None
    profile_parts: Path | None = None


def gateway(options: RoleOptions) -> int:
    """Run a gateway until it is stopped; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        _reach(options, config, "gateway")
        from gateway import app

        return app.run(app.GatewayOptions(**_common(config, "gateway")))

    return _enter("gateway", options, compose)


def conductor(options: RoleOptions, *, alone: bool = False) -> int:
    """Run a conductor until it is stopped; return the exit status. `alone`: no other can lead."""

    def compose(config: DeploymentConfig) -> Role:
        _reach(options, config, "conductor")
        from conductor import process

        ended = environment.ended()
        return process.run(process.ConductorOptions(**_common(config, "conductor"), alone=alone, ended=ended))

    return _enter("conductor", options, compose)


def worker(options: RoleOptions, rank: int) -> int:
    """Run the worker of one rank until it is stopped; return the exit status."""

    def compose(config: DeploymentConfig) -> Role:
        if rank not in config.ranks:
            raise ConfigError(f"rank {rank} is not a rank of {config.name}: expected one of {config.ranks}")
        _reach(options, config, name)
        from workers import process

        ended = environment.ended()
        return process.run(process.WorkerOptions(**_common(config, name), rank=rank, ended=ended))

    name = f"worker-{rank}"
    return _enter(name, options, compose)


def _enter(name: str, options: RoleOptions, compose: Callable[[DeploymentConfig], Role]) -> int:
    if options.parent is not None:
        parent_watch.die_with(options.parent)

    def begin() -> Role:
        with logging_setup.held_back() as records:
            config = resolve.effective(
                options.model, options.settings, with_weights=name.startswith("worker")
            ).config
        # The launcher puts the name before every text line; a JSON line carries it inside.
        is_named = options.parent is None or config.logs.format == "json"
        logging_setup.set_up(config.logs, role=name if is_named else None)
        if options.parent is None:  # the launcher has logged them
            logging_setup.repeat(records)
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
    """Raise if the log's address, credentials or stream are wrong.

    A running role waits for a log that is away; at its own start that is most often a mistake, and is
    reported at once. Under the launcher this is skipped, because the launcher creates the stream while the
    roles start.
    """
    if options.parent is not None:
        return
    from shared.log.nats import jetstream
    from shared.log.nats.durability import PROMISES
    from shared.subjects import Subjects

    url, credentials = resolve.nats_url(config), nats_credentials(config.nats, role)
    subjects = Subjects(config.nats.prefix)

    async def connect_once() -> None:
        log = await jetstream.connect(
            url,
            credentials=credentials,
            subjects=subjects,
            name="dalsegno",
            durability=config.nats.durability,
        )
        _LOGGER.info("durability %s: %s", log.durability, PROMISES[log.durability])
        await log.close()

    asyncio.run(connect_once())


def run(compose: Callable[[], Role]) -> int:
    """Create a role and run it to its end; return the exit status."""
    try:
        role = compose()
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run_until_stopped(role))
    except Exception as error:  # noqa: BLE001 - the outermost handler of the process: report and end
        return _report(error)
    return 0


async def run_until_stopped(role: Role) -> None:
    """Run `role` until it ends, or until SIGTERM or SIGINT cancels it."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(role)
        is_stopping = False
        echo = SignalEcho()

        def stop(number: signal.Signals) -> None:
            nonlocal is_stopping
            if echo.is_echo():
                return
            if is_stopping:
                os._exit(EX_INTERRUPTED)
            is_stopping = True
            _LOGGER.info("stopping: %s", number.name)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)


def _report(error: Exception) -> int:
    """Report the error that ended a role; return its exit status."""
    leaves = [_with_missing_library(leaf) for leaf in _leaves(error)]
    expected = [leaf for leaf in leaves if isinstance(leaf, DalSegnoError) and not isinstance(leaf, BugError)]
    if len(expected) < len(leaves):
        _LOGGER.critical("a bug ended this process", exc_info=error)
        return EX_SOFTWARE
    refusals = [leaf for leaf in expected if isinstance(leaf, ClientError)]
    return _refuse((refusals or expected)[0])


def _with_missing_library(error: BaseException) -> BaseException:
    """Turn a missing library, or a missing module of a model family, into a ClientError."""
    module = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    name = module.partition(".")[0]
    if not name or name in logging_setup.OURS:
        return error
    for family, package in registry.families().items():
        if module.startswith(f"{package}."):
            return ClientError(
                f"model family {family} has no module {module}, and this role needs it; "
                "docs/adding-a-model.md describes the modules of a family"
            )
    return ClientError(f"{name} is not installed, and this role needs it: pip install 'dalsegno[all]'")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, at any depth; a plain error yields itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _refuse(error: DalSegnoError) -> int:
    logging_setup.print_last_message(f"Error: {error.message}")
    return EX_CONFIG if isinstance(error, ClientError) else EX_UNAVAILABLE
