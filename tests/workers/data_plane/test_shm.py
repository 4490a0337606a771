from tests.workers.data_plane.contract import ProcessContract, TransportContract, folder

__all__ = ["folder"]


class TestShm(TransportContract, ProcessContract):
    kind = "shm"
    rounds = 10_000
