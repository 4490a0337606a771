"""Tensors to bytes and back: `Array`, as the data plane carries it, and torch's own.

Bytes are viewed, never converted: numpy has no bfloat16, and needs none. What goes out is not copied where
it is contiguous in the machine's memory already. What comes in is copied, unless it is writable and so
nobody else's: torch has no tensors that cannot be written, and a write into a page that is mapped for
reading would end the process, one into a page that others read would go unnoticed.
"""

import ctypes
from typing import Final

import torch

from shared.tensors import Handle
from workers.data_plane.port import Array, Bytes, DeviceArray, PublishOnDevice

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """As handles spell it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def to_tensor(array: Array | DeviceArray, device: torch.device) -> torch.Tensor:
    """The array's tensor on `device`. It may be written: nobody else sees it.

    Raises:
        ValueError: an unknown dtype, or bytes that do not fit dtype and shape.
    """
    if isinstance(array, DeviceArray):
        return _copied_out(array, device)
    tensor = borrowed(array)
    if array.data.flags.writeable and device.type == "cpu" and tensor.numel():
        return torch.from_numpy(array.data).view(tensor.dtype).view(array.shape)
    return tensor.to(device, copy=True)


def publish(publish_on_device: PublishOnDevice, tensor: torch.Tensor) -> Handle | None:
    """Publish a tensor of the GPU from where it is; None where main memory has to be used (`to_array`)."""
    contiguous = tensor.detach().contiguous()
    source = [(contiguous.data_ptr(), contiguous.nbytes)]
    return publish_on_device(dtype_name(tensor.dtype), tuple(tensor.shape), source, stream_of(tensor.device))


def stream_of(device: torch.device) -> int:
    """Return the CUDA stream that the calling thread computes on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def to_array(tensor: torch.Tensor) -> Array:
    """The tensor's bytes; of one that is contiguous on the CPU, a view."""
    contiguous = tensor.detach().cpu().contiguous()
    return Array(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=_bytes_of(contiguous))


def borrowed(array: Array) -> torch.Tensor:
    """A view of the array's memory, for reading alone, and for no longer than the array is held.

    Raises:
        ValueError: an unknown dtype, or bytes that do not fit dtype and shape.
    """
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"dtype: expected one of {sorted(_DTYPES)}, found {array.dtype!r}")
    elements = 1
    for size in array.shape:
        elements *= size
    if array.data.nbytes != elements * dtype.itemsize:
        raise ValueError(
            f"expected {elements * dtype.itemsize} bytes for {array.dtype}{list(array.shape)}, "
            f"found {array.data.nbytes}"
        )
    if not elements:
        return torch.empty(array.shape, dtype=dtype)
    # By address: `torch.from_numpy` warns of every array that cannot be written.
    memory = (ctypes.c_uint8 * array.data.nbytes).from_address(array.data.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(array.shape)


def _copied_out(array: DeviceArray, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(array.shape, dtype=_DTYPES[array.dtype], device=device)
    array.copy_to([(tensor.data_ptr(), tensor.nbytes)], stream_of(device))
    return tensor


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8).numpy()
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found
