"""Comparison of values that stand once they are released (`Edge.on_resume` is `"keep"`).

Their last bits depend on the batch, so numbers are compared within a tolerance. Other bytes, encoded images
for example, cannot be compared so: a difference is a note, and no divergence.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shared.events import OutputChunk
from shared.output_pieces import whole_metadata

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEPT_TOLERANCE: Final = 1e-2
"""The default tolerance: a share of the largest recorded magnitude."""
_FLOATS: Final = frozenset({"float16", "float32", "float64", "bfloat16"})


class KeptComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The number of compared bytes; the first difference beyond the tolerance; a note on all others."""

    compared: int
    diverges: str | None = None
    note: str | None = None


def compare(
    recorded: Sequence[OutputChunk], found: Sequence[OutputChunk], tolerance: float | None
) -> KeptComparison:
    """Compare the chunks of one modality; none of them are void."""
    was, becomes = _bytes_of(recorded), _bytes_of(found)
    if was == becomes:
        return KeptComparison(compared=len(was))
    kinds = [[_kind(chunk) for chunk in side] for side in (recorded, found)]
    if set(kinds[0]) != set(kinds[1]) or len(was) != len(becomes) or not _are_floats(recorded):
        note = f"found {len(becomes)} other bytes than the {len(was)} that were released, which stand"
        return KeptComparison(compared=len(was), note=note)
    return _of_numbers(_numbers(was, recorded[0]), _numbers(becomes, recorded[0]), len(was), tolerance)


def _of_numbers(
    was: "npt.NDArray[np.float64]", becomes: "npt.NDArray[np.float64]", nbytes: int, tolerance: float | None
) -> KeptComparison:
    import numpy as np

    scale = float(np.abs(was).max(initial=0.0)) or 1.0
    gaps = np.abs(was - becomes) / scale
    gaps[np.isnan(gaps)] = np.inf
    gaps[np.isnan(was) & np.isnan(becomes)] = 0
    allowed = KEPT_TOLERANCE if tolerance is None else tolerance
    worst = float(gaps.max(initial=0.0))
    note = f"differ by at most {worst:.2g} of the largest magnitude; the released values stand"
    if worst <= allowed:
        return KeptComparison(compared=nbytes, note=note)
    place = int(np.argmax(gaps > allowed))
    shown = f"at number {place}: recorded {was[place]:.9g}, found {becomes[place]:.9g}"
    return KeptComparison(compared=nbytes, diverges=shown, note=note)


def _numbers(data: bytes, chunk: OutputChunk) -> "npt.NDArray[np.float64]":
    import numpy as np

    dtype = chunk.metadata["dtype"]
    if dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(np.float64)


def _are_floats(chunks: Sequence[OutputChunk]) -> bool:
    kinds = {chunk.metadata.get("dtype") for chunk in chunks}
    return len(kinds) == 1 and kinds <= _FLOATS


def _kind(chunk: OutputChunk) -> str:
    """The dtype, shape and file type of a chunk's value."""
    metadata: dict[str, Any] = whole_metadata(chunk.metadata)
    return f"{metadata.get('dtype')}{metadata.get('shape')}{metadata.get('content_type', '')}"


def _bytes_of(chunks: Sequence[OutputChunk]) -> bytes:
    return b"".join(chunk.data or b"" for chunk in chunks)
