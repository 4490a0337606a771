"""Who may come to a private server: each role by secrets of its own, made anew at every start.

Our own roles have nkeys, and get them by environment. Who asks over NATS and who reads the log have a
password, as any NATS client takes one; `deployment.json` has both.
"""

import secrets
from collections.abc import Sequence

from shared.log.nats import nkeys
from shared.log.nats.credentials import Credentials
from shared.log.nats.permissions import CLIENT, CONDUCTOR, GATEWAY, PROVISIONER, READER, worker


def private_roles(ranks: Sequence[int]) -> dict[str, Credentials]:
    """The credentials of every role of a deployment with these ranks."""
    own = [PROVISIONER, CONDUCTOR, GATEWAY, *map(worker, ranks)]
    by_key = {role: Credentials(seed=nkeys.new_seed()) for role in own}
    return by_key | {
        role: Credentials(user=role, password=secrets.token_urlsafe(32)) for role in (CLIENT, READER)
    }
