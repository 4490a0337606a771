"""The limit of readers (JetStream consumers) per key: the owner of a reader, and the readers beyond it. Pure.

A server limits the consumers of a stream, but not those of one key. A consumer belongs to the key that may
subscribe to its deliveries: the first token of their subject is a key's own inbox (`_INBOX_<key>`,
`Credentials.inbox_prefix`). Only that key can subscribe there, so a consumer with a subscriber cannot be
attributed to another key. Two groups count as one owner each:

    UNATTENDED   consumers without a subscriber, whatever their subject says: of a process that is gone, say
    _INBOX       clients with NATS' default inbox, which they share. On a server without keys that is
                 everybody, so our own roles are told apart there by the name of the consumer (`gateway-...`)
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from shared.log.nats.api import ListedConsumer

UNATTENDED: Final = "(without a subscriber)"
_SHARED_INBOX: Final = "_INBOX"
_ROLES: Final = frozenset({"conductor", "gateway", "worker", "reader", "client", "dalsegno"})


def owner_of(consumer: ListedConsumer) -> str:
    """Return the owner of a consumer: an inbox prefix, with a role if the inbox is shared."""
    if not consumer.push_bound:
        return UNATTENDED
    inbox = consumer.config.deliver_subject.partition(".")[0]
    role = consumer.name.partition("-")[0]
    return f"{inbox}/{role}" if inbox == _SHARED_INBOX and role in _ROLES else inbox


def excess(consumers: Iterable[ListedConsumer], per_key: int) -> Mapping[str, list[str]]:
    """Return the names of the consumers beyond `per_key` of each owner, by owner.

    The newest are beyond: a key that opens more and more readers loses those, and its first ones go on.
    """
    owned: defaultdict[str, list[ListedConsumer]] = defaultdict(list)
    for consumer in consumers:
        owned[owner_of(consumer)].append(consumer)
    return {
        owner: [one.name for one in sorted(found, key=lambda one: one.created)[per_key:]]
        for owner, found in owned.items()
        if len(found) > per_key
    }
