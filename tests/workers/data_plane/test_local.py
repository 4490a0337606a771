from tests.workers.data_plane.contract import TransportContract, folder

__all__ = ["folder"]


class TestLocal(TransportContract):
    kind = "local"
