"""openpi's client, restated: its packing of arrays, and its WebSocket."""

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import websockets.sync.client


def packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    return value


def unpacked(found: Any) -> Any:
    if b"__ndarray__" in found:
        return np.ndarray(buffer=found[b"data"], dtype=np.dtype(found[b"dtype"]), shape=found[b"shape"])
    return found


def pack(observation: Any) -> bytes:
    data: bytes = msgpack.packb(observation, default=packed)
    return data


class PolicyClient:
    """A connection; `infer` raises RuntimeError with the text of an error."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._stack = ExitStack()
        self.connection = self._stack.enter_context(
            websockets.sync.client.connect(
                url.replace("http://", "ws://"), compression=None, max_size=None, additional_headers=headers
            )
        )
        self.metadata = msgpack.unpackb(self.connection.recv(), object_hook=unpacked)

    def infer(self, observation: Any) -> dict[str, Any]:
        self.connection.send(pack(observation))
        response = self.connection.recv()
        if isinstance(response, str):
            raise RuntimeError(  # noqa: TRY004 - as openpi does
                f"Error in inference server:\n{response}"
            )
        found: dict[str, Any] = msgpack.unpackb(response, object_hook=unpacked)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
