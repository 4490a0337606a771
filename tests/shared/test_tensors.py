"""Dtypes, shapes and sizes of tensors."""

import pytest

from shared.tensors import nbytes_of


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (2, 3), 24),
        ("bfloat16", (), 2),
        ("float8_e5m2", (7,), 7),
        ("int64", (0, 5), 0),
        ("bool", (3,), 3),
    ],
)
def test_a_tensor_has_the_bytes_of_its_dtype_and_shape(
    dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    assert nbytes_of(dtype, shape) == nbytes


def test_an_unknown_dtype_or_a_negative_length_has_no_bytes() -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'float31'; expected one of bool, uint8"):
        nbytes_of("float31", (1,))
    with pytest.raises(ValueError, match=r"found \(-1, -4\)"):
        nbytes_of("float32", (-1, -4))
