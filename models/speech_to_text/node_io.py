"""What CPU nodes take and return: the file of a request, arrays, and small results. No torch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shared.events import Inputs, Media
from shared.tensors import Handle

if TYPE_CHECKING:
    import numpy.typing as npt


def medium_of(args: Mapping[str, Any]) -> Media:
    """The one file of a walk's arguments."""
    (medium,) = msgspec.convert(args["inputs"], Inputs).files
    return medium


def array_of(handle: Handle) -> "npt.NDArray[Any]":
    """The array of an input, which is in the handle itself."""
    return np.frombuffer(handle.data or b"", handle.dtype).reshape(handle.shape)


def inline(key: str, data: bytes) -> Handle:
    """Bytes as an output, in the handle itself."""
    return Handle(key=key, dtype="uint8", shape=(len(data),), data=data)
