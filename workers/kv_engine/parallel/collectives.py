"""Collectives of a tensor-parallel group by torch.distributed, the implementation of `models.base.Peers`.

    CPU   gloo, over TCP between the members' addresses
    GPU   NCCL, over the links between the GPUs

Process groups are created without torch.distributed's global state, so members of different groups, and
tests, can share a process. Only tensors are exchanged; nothing is pickled.

A member that dies closes its connections, and the waiting members fail at once. If a member does not answer,
they fail after `COLLECTIVE_TIMEOUT_S`; but in a replayed CUDA graph NCCL waits without end. There the process
ends when its connection to the member says that it is lost (`workers.tensor_parallel.group`).
"""

import re
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from shared.errors import CapacityError
from workers.kv_engine.parallel.connection import GroupLostError
from workers.kv_engine.parallel.rendezvous import Rendezvous

_DISTRIBUTED: Final[Any] = torch.distributed
"""Typed as Any: much of it has no types."""
COLLECTIVE_TIMEOUT_S: Final = 60.0
"""The most time to wait for another member's part: members compute the same layer at the same time."""
CONNECT_TIMEOUT_S: Final = 600.0
"""Other members may still be starting; the loss of one is noticed by its connection before."""


class TorchPeers:
    """The members of a group, connected by torch.distributed."""

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Connect with the other members, and wait for them.

        Raises:
            GroupLostError: a member does not connect.
            CapacityError: this torch has no backend for the device.
        """
        self.index: Final = rendezvous.index
        self.size: Final = rendezvous.size
        try:
            listening = rendezvous.listener.detach() if rendezvous.listener is not None else None
            self._store = _DISTRIBUTED.TCPStore(
                rendezvous.address,
                rendezvous.port,
                None,
                listening is not None,
                timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
            store = _DISTRIBUTED.PrefixStore(rendezvous.key, self._store)
            make = _nccl if device.type == "cuda" else _gloo
            self._group = make(store, rendezvous)
        except RuntimeError as error:
            raise _lost("the members cannot be connected", error) from error
        self._group.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))

    def add(self, tensor: torch.Tensor) -> None:
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            if _is_recorded(tensor):
                raise
            raise _lost("a sum over all members failed", error) from error

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [tensor.contiguous()]).wait()
        except RuntimeError as error:
            if _is_recorded(tensor):
                raise
            raise _lost("joining the parts of all members failed", error) from error
        return torch.cat(parts, dim=-1)


def _gloo(store: Any, rendezvous: Rendezvous) -> Any:
    gloo = _DISTRIBUTED.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - no public way to set the address
    options._devices = [gloo.create_device(hostname=rendezvous.own_address)]  # noqa: SLF001
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001
    return gloo(store, rendezvous.index, rendezvous.size, options)


def _nccl(store: Any, rendezvous: Rendezvous) -> Any:
    if not _DISTRIBUTED.is_nccl_available():
        raise CapacityError("tp_size on GPUs needs a torch with NCCL, and this one has none")
    nccl = _DISTRIBUTED.ProcessGroupNCCL
    # Sums belong to steps but run on another stream, so it gets the same high priority (`gpu.cuda_streams`).
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001 - no public way
    return nccl(store, rendezvous.index, rendezvous.size, options)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """True in the recording of a CUDA graph: what fails there is no loss, and the step runs unrecorded."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _lost(what: str, error: Exception) -> GroupLostError:
    # Without the location in gloo's sources and its advice.
    why = re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    return GroupLostError(f"{what} ({why}): the whole group restarts")
