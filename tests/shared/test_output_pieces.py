import pytest

from shared.output_pieces import (
    Piece,
    PieceAssembler,
    piece_of,
    piece_spans,
    whole_metadata,
    without_void_pieces,
)


def pieces(*indices: int, tensor: str = "t", of: int = 3) -> list[tuple[dict[str, object], str]]:
    return [(Piece(tensor, index, of).metadata, f"{tensor}{index}") for index in indices]


def test_a_tensor_is_cut_into_pieces_that_make_it_again() -> None:
    data = bytes(range(10))
    spans = piece_spans("n.features", len(data), 4)
    assert [piece for piece, _, _ in spans] == [Piece("n.features", index, 3) for index in range(3)]
    assert b"".join(data[start:stop] for _, start, stop in spans) == data
    assert [piece_of(piece.metadata | {"dtype": "int8"}) for piece, _, _ in spans] == [p for p, _, _ in spans]


@pytest.mark.parametrize(
    ("chunks", "whole"),
    [
        (pieces(0, 1, 2), ["t0", "t1", "t2"]),
        (pieces(0, 1, 0, 1, 2), ["t0", "t1", "t2"]),  # begun again
        (pieces(0, 0, 1, 0, 1), []),  # never completed
        (pieces(1, 2, 0, 1, 2), ["t0", "t1", "t2"]),  # its beginning was missed
        (pieces(0, 2, 1, 2), []),  # a hole
        ([({}, "a"), *pieces(0, 1), ({}, "b"), *pieces(2)], ["a", "b", "t0", "t1", "t2"]),
    ],
)
def test_a_reader_has_whole_tensors_only(
    chunks: list[tuple[dict[str, object], str]], whole: list[str]
) -> None:
    assert without_void_pieces(chunks) == whole


def test_pieces_of_several_tensors_may_alternate() -> None:
    a, b = pieces(0, 1, tensor="a", of=2), pieces(0, 1, tensor="b", of=2)
    assert without_void_pieces([a[0], b[0], a[1], b[1]]) == ["a0", "a1", "b0", "b1"]


def test_what_is_not_complete_is_known() -> None:
    assembler = PieceAssembler[str]()
    for metadata, item in pieces(0, 1):
        assembler.push(metadata, item)
    assert assembler.incomplete == [["t0", "t1"]]


def test_metadata_without_a_valid_place_is_no_piece() -> None:
    assert piece_of({"dtype": "int8"}) is None
    assert piece_of({"tensor": "t", "piece": 3, "pieces": 3}) is None
    assert whole_metadata(Piece("t", 0, 2).metadata | {"dtype": "int8"}) == {"dtype": "int8"}
