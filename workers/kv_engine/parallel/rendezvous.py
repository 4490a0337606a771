"""Where the members of a shared copy meet to connect with one another. No torch."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where they meet, and as which of them one comes.

    Attributes:
        index: of the member; 0 leads.
        size: how many they are.
        address: the leader's, where torch's store listens at `port`.
        own_address: the member's, to be reached at by the others.
        key: what the entries in the store begin with: random, so that no two copies take one another's.
        listener: of the leader alone: listens at `address` and `port`.
    """

    index: int
    size: int
    address: str
    port: int
    own_address: str
    key: str
    listener: socket.socket | None = None
