"""Assembly of a deployment for `dalsegno serve`: data dir, addresses, NATS server and launcher."""

import asyncio
import contextlib
import logging
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from configs.deployment import DeploymentConfig
from configs.nats_access import nats_credentials, stream_policy
from dalsegno import cli
from dalsegno.config import address, environment, resolve
from dalsegno.config.address import Listen
from dalsegno.config.layers import Effective
from dalsegno.roles import logging_setup
from dalsegno.serve import data_dir, lost_worker_reaper, prefix_guard, role_commands, role_imports
from dalsegno.serve.data_dir import DataDir, ReadyFile
from dalsegno.serve.launcher import GRACE_S, Launcher
from dalsegno.serve.lost_worker_reaper import Kill, WorkerProcesses
from dalsegno.serve.options import ServeOptions
from dalsegno.serve.private_credentials import private_roles
from dalsegno.serve.private_nats import PrivateNats
from dalsegno.serve.profile import profiled
from dalsegno.serve.ready_message import ready_message
from dalsegno.serve.supervisor import RefusedError
from dalsegno.templates.template import Template, templates
from dalsegno.terminal.console import Console, WarningHandler
from models import registry
from models.checkpoints.hub_cache import HubName
from shared.errors import ClientError
from shared.log.nats.credentials import Credentials
from shared.log.nats.durability import StreamPolicy
from shared.log.nats.permissions import CLIENT, PROVISIONER, READER, authorization
from shared.log.nats.private_server import NatsServer
from shared.log.port import Log

_PROVISION_S: Final = 30.0
"""Seconds for which the private server may be away (being restarted) while the stream is created."""


def serve(options: ServeOptions) -> None:
    """Run a deployment until it is stopped.

    Raises:
        RefusedError: a role refused its configuration, or would.
        DalSegnoError: it cannot run; no process is left running.
    """
    began_s = time.monotonic()
    with logging_setup.held_back() as records:
        found = resolve.effective(options.model, options.settings)
        try:
            resolve.check(found)
        except ClientError as error:  # a role would refuse it minutes later
            raise RefusedError(error.message) from error
    options = _with_commit(options, found)
    config = found.config
    data = data_dir.of_deployment(config)
    # Templates first, because they must not hold the lock, then the lock: a second start of the same
    # deployment fails before it touches the first one's files.
    with templates(role_imports.of_roles(config), cli.main) as forking, data.lock() as hold:
        listens = address.free(config.gateway.host, config.gateway.port, config.recovery.gateways)
        ready_files = ready_files_of(options, data)
        for file in ready_files:
            file.clear()
        data.remember(config)
        colours = sys.stderr.isatty() and environment.read().colours
        console = Console(
            data.logs, colours=colours, is_json=config.logs.format == "json", level=config.logs.level
        )

        def ready() -> None:
            hold.is_used = True
            graph, took_s = registry.graph(config.model), time.monotonic() - began_s
            console.show(
                ready_message(
                    config.name,
                    listens,
                    data.path,
                    took_s,
                    modalities=graph.modalities,
                    outputs=graph.outputs,
                    voices=config.known_voices,
                    durability=config.nats.durability,
                    has_page=config.gateway.page,
                )
            )

        with (
            contextlib.closing(console),
            _logging_to(WarningHandler(console)),
            profiled(options.profile) as parts,
        ):
            logging_setup.repeat(records)
            asyncio.run(_serve(options, config, listens, data, console, ready, parts, ready_files, forking))


def _with_commit(options: ServeOptions, found: Effective) -> ServeOptions:
    """The arguments of the roles: a model on a hub is the folder of its commit there."""
    if HubName.parse(options.model) is not None and not Path(options.model).is_dir():
        return replace(options, model=found.config.checkpoint)
    return replace(options, settings=(*options.settings, *resolve.pinned(found)))


@contextlib.contextmanager
def _logging_to(handler: logging.Handler) -> Iterator[None]:
    """Handle this process's log records with `handler`."""
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


async def _serve(
    options: ServeOptions,
    config: DeploymentConfig,
    listens: Sequence[Listen],
    data: DataDir,
    console: Console,
    ready: Callable[[], None],
    parts: Path | None,
    ready_files: Sequence[ReadyFile],
    forking: Mapping[str, Template],
) -> None:
    is_synced = config.nats.durability == "host"
    roles = private_roles(config.ranks) if config.nats.url is None else _joined_credentials(config)
    nats = _private(data, config, roles, syncs_always=is_synced) if config.nats.url is None else None
    policy = stream_policy(config.nats, config.media, syncs_always=is_synced and nats is not None)
    try:
        url = await _start(nats) if nats is not None else await _join(config, roles)
        launcher = Launcher(
            listens=listens,
            nats=nats,
            nats_url=url,
            client=roles[CLIENT],
            reader=roles[READER],
            prefix=config.nats.prefix,
            gateway_grace_s=config.gateway.drain_s + GRACE_S,
            commands=role_commands.commands(
                options, config, listens, url, roles if nats is not None else None, parts
            ),
            console=console,
            ready_files=ready_files,
            keep=partial(_keep, url, roles[PROVISIONER], config.nats.prefix, policy, console, nats),
            reap=partial(_reap, url, roles[READER], config.nats.prefix),
            ready=ready,
            templates=forking,
        )
        await launcher.run()
    finally:
        if nats is not None:
            nats.close()


def _joined_credentials(config: DeploymentConfig) -> dict[str, Credentials]:
    """The credentials for another operator's server."""
    return {role: nats_credentials(config.nats, role) for role in (PROVISIONER, READER, CLIENT)}


def _private(
    data: DataDir, config: DeploymentConfig, roles: Mapping[str, Credentials], *, syncs_always: bool
) -> PrivateNats:
    from shared.subjects import Subjects

    permissions = authorization(roles, Subjects(config.nats.prefix))
    return PrivateNats(NatsServer(data.nats, authorization=permissions, syncs_always=syncs_always))


async def _start(nats: PrivateNats) -> str:
    await nats.start()
    return nats.server.url


async def _join(config: DeploymentConfig, roles: Mapping[str, Credentials]) -> str:
    from shared.log.nats import jetstream
    from shared.subjects import Subjects

    url = resolve.nats_url(config)
    # First: an unsuitable server is one line of error.
    await jetstream.provision(
        url, roles[PROVISIONER], Subjects(config.nats.prefix), stream_policy(config.nats, config.media)
    )
    await _require_unused_prefix(url, roles[READER], config.nats.prefix)
    return url


async def _require_unused_prefix(url: str, credentials: Credentials, prefix: str) -> None:
    from shared.log.nats import jetstream
    from shared.subjects import Subjects

    subjects = Subjects(prefix)
    log = await jetstream.connect(url, credentials=credentials, subjects=subjects, name="dalsegno")
    try:
        await prefix_guard.refuse_running_deployment(log, subjects, url)
    finally:
        await log.close()


async def _keep(
    url: str,
    credentials: Credentials,
    prefix: str,
    policy: StreamPolicy,
    console: Console,
    nats: PrivateNats | None,
) -> None:
    """Create the stream, and maintain it."""
    from dalsegno.serve.stream_guard import StreamGuard
    from shared.log.nats.provisioning import Provisioner
    from shared.subjects import Subjects

    async def look_now() -> None:
        await guard.wake()

    provisioner = Provisioner(url, Subjects(prefix), look_now)
    if nats is None:
        guard = StreamGuard(provisioner, policy, console.say)
    else:
        guard = StreamGuard(
            provisioner,
            policy,
            console.say,
            folder=nats.server.log_file.parent,
            failed_write=lambda: nats.server.failed_write,
            restart=nats.kill,
        )
    await provisioner.open(credentials, timeout_s=_PROVISION_S)
    try:
        await guard.prepare(_PROVISION_S)
        await guard.run()
    finally:
        await provisioner.close()


async def _reap(
    url: str, credentials: Credentials, prefix: str, processes: WorkerProcesses, kill: Kill
) -> None:
    """Kill workers that were declared lost and do not join again."""
    from shared.log.nats import jetstream
    from shared.subjects import Subjects

    subjects = Subjects(prefix)

    async def connect() -> Log:
        return await jetstream.connect(
            url, credentials=credentials, subjects=subjects, name="dalsegno", timeout_s=_PROVISION_S
        )

    await lost_worker_reaper.reap(connect, subjects, platform.node(), processes, kill)


def ready_files_of(options: ServeOptions, data: DataDir) -> list[ReadyFile]:
    """The files that describe the deployment while it is ready.

    Raises:
        ClientError: such a file cannot be written.
    """
    files = [data.deployment_file, *([options.ready_file] if options.ready_file is not None else [])]
    for file in files:
        if not file.parent.is_dir():
            raise ClientError(f"cannot write {file}: {file.parent} is not a folder", code="ready_file")
    return list(map(ReadyFile, files))
