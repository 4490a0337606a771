"""The encodings of embeddings, against numpy and the formula of sentence-transformers, restated."""

from array import array
from base64 import b64decode
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gateway.errors import InvalidParamError
from gateway.texts.encodings import Encoding, check_ranges, encode
from gateway.texts.rows import Embedding

VECTORS = np.random.default_rng(0).normal(size=(6, 24)).astype(np.float32)


def encoded(rows: npt.NDArray[np.float32], encoding: Encoding, **kwargs: Any) -> Any:
    return [encode(Embedding([array("f", row.tobytes())]), encoding, **kwargs) for row in rows]


def test_numbers_and_their_base64_are_the_same_float32() -> None:
    assert np.array_equal(np.array(encoded(VECTORS, "float"), np.float32), VECTORS)
    found = [np.frombuffer(b64decode(one), "<f4") for one in encoded(VECTORS, "base64")]
    assert np.array_equal(np.stack(found), VECTORS)


def test_int8_keeps_the_direction_and_the_sign_of_each_number() -> None:
    found = np.array(encoded(VECTORS, "int8"))

    assert np.array_equal(np.abs(found).max(axis=1), [127] * len(VECTORS))
    scale = np.abs(VECTORS).max(axis=1, keepdims=True) / 127
    assert np.abs(found * scale - VECTORS).max() <= scale.max() / 2 + 1e-6
    assert np.array_equal(np.array(encoded(VECTORS, "uint8")), found + 128)
    assert encoded(np.zeros((1, 3), np.float32), "int8") == [[0, 0, 0]]


def test_an_int8_vector_does_not_depend_on_the_other_texts() -> None:
    assert encoded(VECTORS, "int8")[2] == encoded(VECTORS[2:3], "int8")[0]


def test_with_ranges_int8_is_that_of_sentence_transformers() -> None:
    low, high = VECTORS.min(axis=0), VECTORS.max(axis=0)
    expected = (VECTORS.astype(np.float64) - low) / ((high.astype(np.float64) - low) / 255)

    ranges = check_ranges([low.tolist(), high.tolist()], "int8")
    assert np.array_equal(encoded(VECTORS, "int8", ranges=ranges), (expected - 128).astype(np.int8))
    assert np.array_equal(encoded(VECTORS, "uint8", ranges=ranges), expected.astype(np.uint8))


def test_numbers_outside_of_the_ranges_become_their_ends() -> None:
    ranges = check_ranges([[0.0, 0.0], [1.0, 1.0]], "int8")
    assert encoded(np.array([[-5, 5]], np.float32), "int8", ranges=ranges) == [[-128, 127]]
    assert encoded(np.array([[-5, 5]], np.float32), "uint8", ranges=ranges) == [[0, 255]]


def test_bits_are_packed_as_numpy_packs_them() -> None:
    expected = np.packbits(VECTORS > 0, axis=1)
    assert np.array_equal(encoded(VECTORS, "ubinary"), expected)
    assert np.array_equal(encoded(VECTORS, "binary"), expected.astype(int) - 128)
    assert encoded(np.array([[1, -1, 0, 1, 1, 1, 1, 1, 1]], np.float32), "ubinary") == [
        [0b10011111, 0b10000000]
    ]


def test_the_embedding_of_a_multi_vector_model_is_a_list() -> None:
    found = encode(Embedding([array("f", [1.0, -1.0]), array("f", [2.0, 1.0])], is_multi=True), "int8")
    assert found == [[127, -127], [127, 64]]


@pytest.mark.parametrize(
    ("ranges", "encoding", "param"),
    [
        ([[0.0], [1.0]], "float", "quantization_ranges"),
        ([[0.0], [1.0]], "binary", "quantization_ranges"),
        ([[0.0]], "int8", "quantization_ranges"),
        ([[0.0, 1.0], [1.0]], "int8", "quantization_ranges"),
        ([[0.0, 1.0], [1.0, 1.0]], "int8", "quantization_ranges[1][1]"),
        ([[0.0], [5e-324]], "int8", "quantization_ranges[1][0]"),
    ],
)
def test_malformed_ranges_are_refused(ranges: list[list[float]], encoding: Encoding, param: str) -> None:
    with pytest.raises(InvalidParamError) as refused:
        check_ranges(ranges, encoding)
    assert refused.value.param == param


def test_ranges_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidParamError, match="two lists of 24 numbers"):
        encoded(VECTORS, "int8", ranges=([0.0], [1.0]))
