"""CUDA's runtime, pretended: memory is the machine's own, and what is done is written down in order."""

import ctypes
import itertools
from typing import ClassVar

import numpy as np

from workers.data_plane.memory.cuda_driver import HANDLE_BYTES
from workers.data_plane.port import Bytes


class CudaError(RuntimeError):
    """What this driver raises."""


class Gpus:
    """The GPUs of one machine: what all its processes have in common."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.numbers = itertools.count(1)
        self.memory: dict[int, Bytes] = {}
        self.exported: dict[bytes, int] = {}
        self.is_ipc_refused = False
        self.sees_peers = True


class PretendedCuda:
    """One process' driver."""

    CUDARuntimeError: ClassVar[type[Exception]] = CudaError

    def __init__(self, gpus: Gpus, *, device: int = 0) -> None:
        self.gpus = gpus
        self.device = device
        self.log: list[tuple[object, ...]] = []
        self.opened: list[int] = []
        self.events: set[int] = set()
        self.streams: set[int] = set()
        self.pinned: list[int] = []

    def getDeviceCount(self) -> int:  # noqa: N802 - CUDA's names, here and below
        return self.gpus.count

    def getDevice(self) -> int:  # noqa: N802
        return self.device

    def setDevice(self, device: int, /) -> None:  # noqa: N802
        self.device = device

    def deviceGetPCIBusId(self, device: int, /) -> str:  # noqa: N802
        return f"0000:{device:02x}:00.0"

    def deviceGetByPCIBusId(self, pci_bus_id: str, /) -> int:  # noqa: N802
        device = int(pci_bus_id.split(":")[1], 16)
        if device >= self.gpus.count:
            raise CudaError("cudaErrorInvalidDevice")
        return device

    def deviceCanAccessPeer(self, device: int, peer: int, /) -> int:  # noqa: N802
        return int(self.gpus.sees_peers)

    def malloc(self, size: int, /) -> int:
        if size > 1 << 28:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        memory = np.zeros(size, np.uint8)
        pointer = int(memory.ctypes.data)
        self.gpus.memory[pointer] = memory
        return pointer

    def free(self, pointer: int, /) -> None:
        del self.gpus.memory[pointer]

    def hostRegister(self, pointer: int, size: int, flags: int, /) -> None:  # noqa: N802
        self.pinned.append(pointer)

    def hostUnregister(self, pointer: int, /) -> None:  # noqa: N802
        self.pinned.remove(pointer)

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int, /) -> None:  # noqa: N802
        self.log.append(("copy", stream, size, kind))
        ctypes.memmove(to, source, size)

    def streamCreateWithFlags(self, flags: int, /) -> int:  # noqa: N802
        stream = next(self.gpus.numbers)
        self.streams.add(stream)
        return stream

    def streamDestroy(self, stream: int, /) -> None:  # noqa: N802
        self.streams.remove(stream)

    def streamSynchronize(self, stream: int, /) -> None:  # noqa: N802
        self.log.append(("synchronize", stream))

    def streamWaitEvent(self, stream: int, event: int, /) -> None:  # noqa: N802
        assert event in self.events, "an event that is not this process'"
        self.log.append(("wait", stream, event))

    def eventCreateWithFlags(self, flags: int, /) -> int:  # noqa: N802
        assert flags == 6, "without timing, interprocess"
        event = next(self.gpus.numbers)
        self.events.add(event)
        return event

    def eventDestroy(self, event: int, /) -> None:  # noqa: N802
        self.events.remove(event)

    def eventRecord(self, event: int, stream: int, /) -> None:  # noqa: N802
        self.log.append(("record", event, stream))

    def ipcGetMemHandle(self, pointer: int, /) -> bytes:  # noqa: N802
        return self._export(pointer)

    def ipcOpenMemHandle(self, handle: bytes, flags: int, /) -> int:  # noqa: N802
        assert flags == 1, "lazy access to peers"
        pointer = self._import(handle)
        self.log.append(("open", self.device))
        self.opened.append(pointer)
        return pointer

    def ipcCloseMemHandle(self, pointer: int, /) -> None:  # noqa: N802
        self.opened.remove(pointer)

    def ipcGetEventHandle(self, event: int, /) -> bytes:  # noqa: N802
        return self._export(event)

    def ipcOpenEventHandle(self, handle: bytes, /) -> int:  # noqa: N802
        event = self._import(handle)
        self.events.add(event)
        return event

    def _export(self, number: int) -> bytes:
        if self.gpus.is_ipc_refused:
            raise CudaError("cudaErrorNotSupported")
        handle = number.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")
        self.gpus.exported[handle] = number
        return handle

    def _import(self, handle: bytes) -> int:
        if self.gpus.is_ipc_refused:
            raise CudaError("cudaErrorMapBufferObjectFailed")
        return self.gpus.exported[handle]
