"""The contract over NIXL; run by test_nixl.py in processes of its own, with UCX set up in several ways."""

from tests.workers.data_plane.contract import ProcessContract, TransportContract, folder

__all__ = ["folder"]


class TestNixl(TransportContract, ProcessContract):
    kind = "nixl"
    rounds = 256
