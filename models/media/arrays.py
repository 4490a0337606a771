"""Reading of arrays from npy, npz and safetensors files; nothing in them is executed (no pickle)."""

import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from models.media.detection import HEAD_BYTES, format_of
from models.media.kinds import MediaError, MediaLimits, MediaTooLargeError, UnsupportedMediaError

Arrays = Mapping[str, npt.NDArray[Any]]


def read_arrays(file: BinaryIO, limits: MediaLimits) -> Arrays:
    """Read the arrays of a file, by name; the array of an npy file has the empty name.

    Raises:
        MediaError: the file is damaged, of another kind, or beyond a limit.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    found = format_of(head)
    try:
        match found.content_type if found else "":
            case "application/zip":
                return _npz(file, limits)
            case "application/x-npy":
                return {"": np.load(file, allow_pickle=False)}
            case "application/safetensors":
                from safetensors.numpy import load  # noqa: PLC0415 - only for this format

                arrays: Arrays = load(file.read())
                return arrays
            case _:
                pass
    except (MediaError, MemoryError):
        raise
    except Exception as error:
        raise MediaError(
            f"expected a complete file, found damage: {type(error).__name__}: {error}"
        ) from error
    kind = found.content_type if found else "an unknown format"
    raise UnsupportedMediaError(f"expected arrays (npz, npy or safetensors), found {kind}")


def _npz(file: BinaryIO, limits: MediaLimits) -> Arrays:
    with zipfile.ZipFile(file) as archive:
        nbytes = sum(one.file_size for one in archive.infolist())
    if nbytes > limits.max_decoded_bytes:
        raise MediaTooLargeError(
            f"expected arrays of at most {limits.max_decoded_bytes:,} bytes together, found {nbytes:,}"
        )
    file.seek(0)
    with np.load(file, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns the bytes of other files
            raise UnsupportedMediaError(
                f"expected arrays (npy files) alone in an npz archive, found the file {name[:80]!r}"
            )
    return arrays
