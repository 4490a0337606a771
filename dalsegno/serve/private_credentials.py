"""Credentials of a private NATS server: one per role, generated at every start.

Roles of the launcher have nkeys, passed by environment. Services that submit requests or read the log have a
password, which any NATS client supports; `deployment.json` contains both.
"""

import secrets
from collections.abc import Sequence

from shared.log.nats import nkeys
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import CLIENT, CONDUCTOR, GATEWAY, PROVISIONER, READER, worker


def private_roles(ranks: Sequence[int]) -> dict[str, Credentials]:
    """Return the credentials of every role of a deployment with these ranks."""
    own = [PROVISIONER, CONDUCTOR, GATEWAY, *map(worker, ranks)]
    by_key = {role: Credentials(seed=nkeys.new_seed()) for role in own}
    return by_key | {
        role: Credentials(user=role, password=secrets.token_urlsafe(32)) for role in (CLIENT, READER)
    }
