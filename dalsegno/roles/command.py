"""The commands `gateway`, `conductor` and `worker` (one role process each) and `provision` (the stream)."""

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dalsegno.config import options

if TYPE_CHECKING:
    from dalsegno.roles.role_process import RoleOptions


@click.command()
@options.of_log
def provision(**flags: Any) -> None:
    """Create a deployment's streams in a NATS server: the log, and the media of requests.

    Existing streams are kept, with everything they hold.
    """
    import asyncio

    from configs.nats_access import nats_credentials, stream_policy
    from dalsegno.config import address, resolve
    from shared.log.nats import jetstream
    from shared.log.nats.durability import PROMISES
    from shared.log.nats.permissions import PROVISIONER
    from shared.subjects import Subjects

    config = resolve.reach(options.settings_in(flags))
    nats, policy = config.nats, stream_policy(config.nats, config.media)
    if nats.url is None:
        raise click.UsageError("no NATS server: name it with --nats, or in DALSEGNO_NATS_URL")
    url, credentials = address.nats_url(nats.url), nats_credentials(nats, PROVISIONER)
    asyncio.run(jetstream.provision(url, credentials, Subjects(nats.prefix), policy, timeout_s=0.0))
    click.echo(f"The streams of prefix {nats.prefix!r} are in {url}: {PROMISES[nats.durability]}.")


@click.command()
@options.of_gateway
def gateway(**flags: Any) -> None:
    """Run one gateway: HTTP requests in, log events out."""
    from dalsegno.roles import role_process

    _exit(role_process.gateway(_options(flags)))


@click.command()
@options.of_conductor
def conductor(alone: bool, **flags: Any) -> None:
    """Run one conductor; of several, one leads and the others stand by."""
    from dalsegno.roles import role_process

    _exit(role_process.conductor(_options(flags), alone=alone))


@click.command()
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="The worker's rank.")
@options.of_role
def worker(rank: int, **flags: Any) -> None:
    """Run the worker of one rank."""
    from dalsegno.roles import role_process

    _exit(role_process.worker(_options(flags), rank))


def _exit(status: int) -> NoReturn:
    from dalsegno.roles import gc_tuning

    gc_tuning.freeze_all()
    sys.exit(status)


def _options(flags: dict[str, Any]) -> "RoleOptions":
    from dalsegno.roles.role_process import RoleOptions

    return RoleOptions(settings=options.settings_in(flags), **flags)
