from typing import Any

import numpy as np
import pytest
import torch

from workers.data_plane.arrays import to_array, to_tensor
from workers.data_plane.port import Array

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(int(np.prod(shape))).view(shape) % 3).to(dtype)

    array = to_array(tensor)

    assert (array.dtype, array.shape) == (str(dtype).removeprefix("torch."), shape)
    assert array.data.dtype == np.uint8
    assert array.data.shape == (tensor.numel() * dtype.itemsize,)
    found = to_tensor(array, CPU)
    assert found.dtype is dtype
    assert torch.equal(found, tensor)


def test_bytes_are_little_endian_and_in_order() -> None:
    assert to_array(torch.tensor([1, 258], dtype=torch.int32)).data.tolist() == [1, 0, 0, 0, 2, 1, 0, 0]
    assert to_array(torch.tensor([1.0], dtype=torch.bfloat16)).data.tolist() == [0x80, 0x3F]


def test_what_goes_out_is_copied_only_where_it_is_not_contiguous() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)

    assert to_array(tensor).data.ctypes.data == tensor.data_ptr()
    turned = to_array(tensor.t())
    assert (turned.shape, turned.data.view(np.float32).tolist()[:3]) == ((4, 3), [0, 4, 8])


def test_what_comes_in_is_a_view_only_where_it_is_nobody_elses() -> None:
    own = Array(dtype="float32", shape=(2,), data=np.zeros(8, np.uint8))
    shared = Array(dtype="float32", shape=(2,), data=np.frombuffer(bytes(8), np.uint8))

    to_tensor(own, CPU)[0] = 1
    to_tensor(shared, CPU)[0] = 1

    assert own.data.view(np.float32).tolist() == [1, 0]
    assert shared.data.view(np.float32).tolist() == [0, 0]


def test_a_view_keeps_its_memory() -> None:
    tensor = to_tensor(Array(dtype="uint8", shape=(9,), data=np.full(9, 7, np.uint8)), CPU)

    assert tensor.tolist() == [7] * 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "complex64"}, "dtype: expected one of .*, found 'complex64'"),
        ({"dtype": "nn"}, "found 'nn'"),
        ({"shape": (3,)}, r"expected 12 bytes for float32\[3\], found 8"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"dtype": "float32", "shape": (2,), "data": np.zeros(8, np.uint8)}

    with pytest.raises(ValueError, match=message):
        to_tensor(Array(**(values | changes)), CPU)
