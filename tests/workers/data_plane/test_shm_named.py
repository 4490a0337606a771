from tests.workers.data_plane.contract import ProcessContract, TransportContract, folder

__all__ = ["folder"]


class TestNamedShm(TransportContract, ProcessContract):
    kind = "shm_named"
