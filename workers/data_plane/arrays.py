"""Conversion between torch tensors and the data plane's arrays.

Bytes are viewed, never converted: numpy has no bfloat16, and needs none. An outgoing tensor that is
contiguous in main memory is not copied. An incoming one is copied unless it is writable, and therefore
private: torch has no read-only tensors, a write into a page mapped for reading would end the process, and a
write into a shared page would corrupt it.
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
    """Return the name of a dtype in handles: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def to_tensor(array: Array | DeviceArray, device: torch.device) -> torch.Tensor:
    """Return the array's tensor on `device`. It is private, so it may be written.

    Raises:
        ValueError: the dtype is unknown, or the bytes do not fit dtype and shape.
    """
    if isinstance(array, DeviceArray):
        return _copied_out(array, device)
    tensor = borrowed(array)
    if array.data.flags.writeable and device.type == "cpu" and tensor.numel():
        return torch.from_numpy(array.data).view(tensor.dtype).view(array.shape)
    return tensor.to(device, copy=True)


def shape_only(array: Array | DeviceArray) -> torch.Tensor:
    """Return a tensor of the array's dtype and shape, without data (on the device `meta`).

    Raises:
        ValueError: the dtype is unknown.
    """
    dtype = _DTYPES.get(array.dtype)
    if dtype is None:
        raise ValueError(f"dtype: expected one of {sorted(_DTYPES)}, found {array.dtype!r}")
    return torch.empty(array.shape, dtype=dtype, device="meta")


def publish(publish_on_device: PublishOnDevice, tensor: torch.Tensor) -> Handle | None:
    """Publish a tensor of the GPU from where it is; None where main memory has to be used (`to_array`)."""
    contiguous = tensor.detach().contiguous()
    source = [(contiguous.data_ptr(), contiguous.nbytes)]
    return publish_on_device(dtype_name(tensor.dtype), tuple(tensor.shape), source, stream_of(tensor.device))


def stream_of(device: torch.device) -> int:
    """Return the CUDA stream that the calling thread computes on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def to_array(tensor: torch.Tensor) -> Array:
    """Return the tensor's bytes; a view if the tensor is contiguous on the CPU."""
    contiguous = tensor.detach().cpu().contiguous()
    return Array(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=_bytes_of(contiguous))


def borrowed(array: Array) -> torch.Tensor:
    """Return a view of the array's memory. It must not be written, or used longer than the array is held.

    Raises:
        ValueError: the dtype is unknown, or the bytes do not fit dtype and shape.
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
    # By address, because `torch.from_numpy` warns about read-only arrays.
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
