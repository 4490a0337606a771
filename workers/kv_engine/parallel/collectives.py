"""The seam through which members of a shared copy add up what they computed: `models.base.Peers`.

    CPU   gloo, over TCP between the members' addresses
    GPU   NCCL, over whatever connects the GPUs

torch.distributed's process groups are made here directly, without its global state: members of different
copies, and tests, may live in one process. Only tensors pass: nothing is pickled.

A member that dies closes its connections, and whoever waits for its part is told at once; one that does not
answer, within `PATIENCE_S`.
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
"""Much of it has no types."""
PATIENCE_S: Final = 60.0
"""Members compute the same at the same time: nobody waits longer for another's part of a layer."""
CONNECT_S: Final = 600.0
"""For so long the others may still be starting; one that is gone meanwhile is seen by its connection."""


class TorchPeers:
    """The members, by torch.distributed."""

    def __init__(self, meeting: Rendezvous, device: torch.device) -> None:
        """Connect with the others; waits for them.

        Raises:
            GroupLostError: one of them does not come.
            CapacityError: this torch has nothing that connects such devices.
        """
        self.index: Final = meeting.index
        self.size: Final = meeting.size
        try:
            listening = meeting.listener.detach() if meeting.listener is not None else None
            self._store = _DISTRIBUTED.TCPStore(
                meeting.address,
                meeting.port,
                None,
                listening is not None,
                timeout=timedelta(seconds=CONNECT_S),
                wait_for_workers=False,
                master_listen_fd=listening,
            )
            store = _DISTRIBUTED.PrefixStore(meeting.key, self._store)
            make = _nccl if device.type == "cuda" else _gloo
            self._group = make(store, meeting)
        except RuntimeError as error:
            raise _lost("the members cannot be connected", error) from error
        self._group.set_timeout(timedelta(seconds=PATIENCE_S))

    def add(self, tensor: torch.Tensor) -> None:
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise _lost("a sum over all members failed", error) from error

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [tensor.contiguous()]).wait()
        except RuntimeError as error:
            raise _lost("joining the parts of all members failed", error) from error
        return torch.cat(parts, dim=-1)


def _gloo(store: Any, meeting: Rendezvous) -> Any:
    gloo = _DISTRIBUTED.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - no public way to say at which address
    options._devices = [gloo.create_device(hostname=meeting.own_address)]  # noqa: SLF001
    options._timeout = timedelta(seconds=CONNECT_S)  # noqa: SLF001
    return gloo(store, meeting.index, meeting.size, options)


def _nccl(store: Any, meeting: Rendezvous) -> Any:
    if not _DISTRIBUTED.is_nccl_available():
        raise CapacityError("tp_size on GPUs needs a torch with NCCL, and this one has none")
    nccl = _DISTRIBUTED.ProcessGroupNCCL
    # Sums are a part of steps, and have a stream of their own: it goes first as theirs (`gpu_streams`).
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=CONNECT_S)  # noqa: SLF001 - no public way
    return nccl(store, meeting.index, meeting.size, options)


def _lost(what: str, error: Exception) -> GroupLostError:
    # Without the place in gloo's sources, and its advice.
    why = re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    return GroupLostError(f"{what} ({why}): all members of the copy begin anew")
