"""The bytes of a checkpoint's weights, by the headers of its safetensors files. No weights are read.

The headers of files in the cache are read there, those of files on a hub by range requests.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dalsegno.hub import download, listing, selection
from dalsegno.hub.errors import DamagedDownloadError, of_hub
from dalsegno.hub.listing import Hub, HubFile, Listing
from models.checkpoints.files import CheckpointError
from models.checkpoints.hub_cache import HubName

_LARGEST_HEADER: Final = 100 << 20
_FLOATS: Final = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_BITS: Final = {
    **_FLOATS,
    **dict.fromkeys(("I64", "U64"), 64),
    **dict.fromkeys(("I32", "U32"), 32),
    **dict.fromkeys(("I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    "F4": 4,
}


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: list[Annotated[int, Meta(ge=0)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizes:
    """The numbers of a checkpoint's weights, by the dtype in which they are stored."""

    numbers: Mapping[str, int]

    @property
    def stored_bytes(self) -> int:
        """The bytes in the dtypes of the files."""
        return sum(count * _BITS.get(dtype, 16) // 8 for dtype, count in self.numbers.items())

    def bytes_as(self, bytes_each: int) -> int:
        """The bytes if floating-point numbers are converted; quantized ones stay as they are."""
        bits = {**_BITS, **dict.fromkeys(_FLOATS, 8 * bytes_each)}
        return sum(count * bits.get(dtype, 16) // 8 for dtype, count in self.numbers.items())


def of_hub_name(name: HubName, hub: Hub, folder: Path) -> WeightSizes | None:
    """The weights of a commit whose configuration is in `folder`; None if they are not known here.

    Raises:
        HubError, HubUnavailableError: a header cannot be read.
    """
    if (known := listing.kept(hub, name)) is None:
        return of_files(selection.safetensors_of(folder))
    files = [file for file in selection.weights(known, folder) if file.path.endswith(".safetensors")]
    headers = []
    for file in files:
        path = download.place(hub, known, file)
        if path.exists():
            headers.append(_read(path))
        elif hub.is_offline:
            return None
        else:
            headers.append(_ask(hub, known, file))
    return _counted(headers)


def of_files(paths: Iterable[Path]) -> WeightSizes | None:
    """The weights in files; None if there are none.

    Raises:
        CheckpointError: a file is no safetensors file.
    """
    return _counted([_read(path) for path in paths])


def _counted(headers: list[Mapping[str, _Tensor]]) -> WeightSizes | None:
    numbers: Counter[str] = Counter()
    for header in headers:
        for tensor in header.values():
            numbers[tensor.dtype] += prod(tensor.shape)
    return WeightSizes(numbers=dict(numbers)) if numbers else None


def _read(path: Path) -> Mapping[str, _Tensor]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return _tensors(file.read(min(length, _LARGEST_HEADER)))
    except (OSError, struct.error, ValueError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}; download it again") from error


def _tensors(header: bytes) -> Mapping[str, _Tensor]:
    found = msgspec.json.decode(header, type=dict[str, Any])
    return msgspec.convert(
        {name: it for name, it in found.items() if name != "__metadata__"}, dict[str, _Tensor]
    )


def _ask(hub: Hub, known: Listing, file: HubFile) -> Mapping[str, _Tensor]:
    from huggingface_hub.errors import SafetensorsParsingError

    with of_hub(known.name, hub.endpoint, has_token=bool(hub.token)):
        try:
            found = hub.api().parse_safetensors_file_metadata(
                known.repository, file.path, revision=known.commit
            )
        except SafetensorsParsingError as error:
            raise DamagedDownloadError(
                f"{file.path} of {known.name} is no safetensors file: {error}"
            ) from error
    return {name: _Tensor(dtype=str(it.dtype), shape=list(it.shape)) for name, it in found.tensors.items()}
