"""The calls of CUDA's runtime that the data plane makes, named as cupy names them (`cupy.cuda.runtime`).

Pointers, streams and events are plain numbers, as they are there and in torch (`Stream.cuda_stream`).
"""

import importlib
from typing import Final, Protocol, cast

EVENT_FLAGS: Final = 2 | 4
"""Without timing, interprocess."""
LAZY_PEER_ACCESS: Final = 1
DEVICE_TO_HOST: Final = 2
ANY_TO_ANY: Final = 4
"""The direction follows from the pointers."""
NON_BLOCKING: Final = 1
HANDLE_BYTES: Final = 64


class Driver(Protocol):
    """All raise `CUDARuntimeError`."""

    @property
    def CUDARuntimeError(self) -> type[Exception]: ...  # noqa: N802 - CUDA's names, here and below

    def getDeviceCount(self) -> int: ...  # noqa: N802
    def getDevice(self) -> int: ...  # noqa: N802
    def setDevice(self, device: int, /) -> None: ...  # noqa: N802
    def deviceGetPCIBusId(self, device: int, /) -> str: ...  # noqa: N802
    def deviceGetByPCIBusId(self, pci_bus_id: str, /) -> int: ...  # noqa: N802
    def deviceCanAccessPeer(self, device: int, peer: int, /) -> int: ...  # noqa: N802

    def malloc(self, size: int, /) -> int: ...
    def free(self, pointer: int, /) -> None: ...
    def hostRegister(self, pointer: int, size: int, flags: int, /) -> None: ...  # noqa: N802
    def hostUnregister(self, pointer: int, /) -> None: ...  # noqa: N802
    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int, /) -> None: ...  # noqa: N802

    def streamCreateWithFlags(self, flags: int, /) -> int: ...  # noqa: N802
    def streamDestroy(self, stream: int, /) -> None: ...  # noqa: N802
    def streamSynchronize(self, stream: int, /) -> None: ...  # noqa: N802
    def streamWaitEvent(self, stream: int, event: int, /) -> None: ...  # noqa: N802
    def eventCreateWithFlags(self, flags: int, /) -> int: ...  # noqa: N802
    def eventDestroy(self, event: int, /) -> None: ...  # noqa: N802
    def eventRecord(self, event: int, stream: int, /) -> None: ...  # noqa: N802

    def ipcGetMemHandle(self, pointer: int, /) -> bytes: ...  # noqa: N802
    def ipcOpenMemHandle(self, handle: bytes, flags: int, /) -> int: ...  # noqa: N802
    def ipcCloseMemHandle(self, pointer: int, /) -> None: ...  # noqa: N802
    def ipcGetEventHandle(self, event: int, /) -> bytes: ...  # noqa: N802
    def ipcOpenEventHandle(self, handle: bytes, /) -> int: ...  # noqa: N802


def find_driver() -> Driver | None:
    """Return CUDA's runtime; None without cupy (the extra `gpu`) or without a GPU."""
    try:
        runtime = importlib.import_module("cupy.cuda.runtime")
    except ImportError:
        return None
    driver = cast("Driver", runtime)
    try:
        return driver if driver.getDeviceCount() else None
    except driver.CUDARuntimeError:
        return None
