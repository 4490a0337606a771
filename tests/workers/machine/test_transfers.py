"""Numbers reach a device as they are."""

import numpy as np
import pytest
import torch

from workers.machine.transfers import begin_download, upload


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.bool_])
def test_a_tensor_on_a_cpu_has_the_memory_of_the_array(dtype: type[np.generic]) -> None:
    values = np.array([[1, 0, 3]]).astype(dtype)

    found = upload(values, torch.device("cpu"))

    assert found.tolist() == values.tolist()
    assert found.data_ptr() == values.ctypes.data


def test_what_is_on_a_cpu_has_arrived() -> None:
    tensor = torch.arange(3.0)
    assert begin_download(tensor)() is tensor
