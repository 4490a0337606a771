"""The address at which the members of a tensor-parallel group connect for their collectives. No torch."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """A member's view of the rendezvous.

    Attributes:
        index: the member's index; 0 is the leader.
        address: the leader's address, where torch's store listens at `port`.
        own_address: this member's address, at which the others reach it.
        key: random prefix of the entries in the store, so that groups cannot mix them up.
        listener: of the leader only: a socket that listens at `address` and `port`.
    """

    index: int
    size: int
    address: str
    port: int
    own_address: str
    key: str
    listener: socket.socket | None = None
