from typing import Any

import numpy as np
import pytest

from dalsegno.replay.kept_values import compare
from dalsegno.replay.recorded_run import Run
from dalsegno.replay.run_comparison import compared
from shared.events import OutputChunk
from shared.output_pieces import piece_spans

NUMBERS = np.array([4, -2, 1, 0.5], np.float32)


def chunk(data: bytes, **metadata: Any) -> OutputChunk:
    return OutputChunk(modality="latents", data=data, metadata={"dtype": "float32", "shape": [4]} | metadata)


def of(array: np.ndarray[Any, Any]) -> list[OutputChunk]:
    return [chunk(array.tobytes(), dtype=str(array.dtype))]


def pieces(array: np.ndarray[Any, Any], count: int = 4) -> list[OutputChunk]:
    data = array.tobytes()
    return [
        chunk(data[start:stop], **piece.metadata) for piece, start, stop in piece_spans("n.e", 16, 4)[:count]
    ]


def test_equal_bytes_need_no_note() -> None:
    found = compare(of(NUMBERS), of(NUMBERS), None)
    assert (found.compared, found.diverges, found.note) == (16, None, None)


@pytest.mark.parametrize(("gap", "tolerance", "diverges"), [
    (0.01, None, False), (0.1, None, True), (0.1, 0.1, False), (0.01, 0.001, True), (1e-6, 0.0, True),
])  # fmt: skip
def test_numbers_are_compared_within_a_share_of_the_largest_magnitude(
    gap: float, tolerance: float | None, diverges: bool
) -> None:
    other = NUMBERS + np.array([0, 0, gap, 0], np.float32)
    found = compare(of(NUMBERS), of(other), tolerance)
    assert (found.diverges is not None) is diverges
    assert found.note is not None
    if diverges:
        assert "at number 2: recorded 1, found 1" in str(found.diverges)


def test_a_number_that_is_none_any_more_diverges() -> None:
    assert compare(of(NUMBERS), of(NUMBERS * np.nan), 1.0).diverges is not None
    assert compare(of(NUMBERS * np.nan), of(NUMBERS * np.nan), None).diverges is None


def test_other_files_are_noted_because_the_released_ones_stand() -> None:
    files = [[chunk(data, dtype="uint8", content_type="image/png")] for data in (b"one", b"two!")]
    found = compare(files[0], files[1], None)
    assert found.diverges is None
    assert "found 4 other bytes than the 3 that were released" in str(found.note)


def test_pieces_that_a_later_attempt_voided_are_not_compared() -> None:
    recorded, again = Run(), Run()
    recorded.tracks[""] = [*pieces(NUMBERS * 7, 3), *pieces(NUMBERS)]
    again.tracks[""] = pieces(NUMBERS)
    [edge] = compared(recorded, again, None)
    assert (edge.name, edge.compared, edge.diverges) == ("latents", 16, None)


def test_only_values_that_stand_are_compared_with_tolerance() -> None:
    recorded, again = Run(), Run()
    recorded.tracks[""], again.tracks[""] = of(NUMBERS), of(NUMBERS + np.float32(1e-4))
    [strict] = compared(recorded, again, None)
    [kept] = compared(recorded, again, None, kept={"": frozenset({"latents"})})
    assert (strict.diverges is None, kept.diverges is None) == (False, True)
