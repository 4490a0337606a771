"""The memory that a request takes beside the weights, estimated before anything is computed.

Two moments decide: a forward of the denoiser, whose activations grow with the tokens of the picture, and the
decoding by the VAE, whose activations grow with its pixels. The factors are upper bounds of measurements with
diffusers 0.42 on a CPU (docs/log.md).
"""

from collections.abc import Mapping
from typing import Any, Final

from models.diffusion_pipelines.classes import class_of
from models.diffusion_pipelines.components import weights_of
from models.diffusion_pipelines.folder import PipelineFolder
from models.diffusion_pipelines.requests import PipelineCall
from shared.errors import ClientError

_DENOISER_TENSORS: Final = 24
"""Tensors of the hidden width that are alive at a time in a block, its wider feed-forward included."""
_VAE_TENSORS: Final = 4
"""Tensors of the VAE's first width that are alive at a time at full resolution."""
_BYTES: Final = 4
_TILE: Final = 512
_DEFAULT_WIDTH: Final = 128
_GIB: Final = 1 << 30


def request_bytes(folder: PipelineFolder, call: PipelineCall, *, tiled: bool = False) -> int:
    """The most bytes that a request takes beside the weights; 0 if the pipeline decides its size."""
    if not call.width:
        return 0
    step = class_of(folder).side_step(folder)
    latent_frames = 1 + (call.frames - 1) // max(1, class_of(folder).frame_step(folder))
    tokens = (call.width // step) * (call.height // step) * latent_frames
    denoising = tokens * _hidden_width(folder) * _DENOISER_TENSORS * _BYTES
    pixels = min(call.width, _TILE) * min(call.height, _TILE) if tiled else call.width * call.height
    frames = min(call.frames, class_of(folder).frame_step(folder)) or 1
    decoding = pixels * frames * _vae_width(folder) * _VAE_TENSORS * _BYTES
    frames_out = call.width * call.height * call.frames * 3 * (_BYTES + 1)
    return int(max(denoising, decoding + frames_out))


def _hidden_width(folder: PipelineFolder) -> int:
    part = folder.config("transformer") or folder.config("unet")
    if (heads := part.get("num_attention_heads")) and (width := part.get("attention_head_dim")):
        return int(heads * width) if isinstance(heads, int) and isinstance(width, int) else 0
    for name in ("dim", "hidden_size"):
        if isinstance(part.get(name), int):
            return int(part[name])
    channels = part.get("block_out_channels")
    return int(max(channels)) if channels else _DEFAULT_WIDTH


def _vae_width(folder: PipelineFolder) -> int:
    vae = folder.config("vae")
    channels = vae.get("block_out_channels")
    if channels:
        return int(min(channels))
    return int(vae.get("decoder_base_dim") or vae.get("base_dim") or _DEFAULT_WIDTH)


def weight_bytes(folder: PipelineFolder) -> dict[str, int]:
    """The bytes of the weights of each part that has any, by the headers of their files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    found = {name: weights_of(folder.path, part).nbytes for name, part in folder.index.components.items()}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def limit_of(folder: PipelineFolder, kwargs: Mapping[str, Any], device_bytes: int | None) -> int | None:
    """The most bytes of a request, None for any.

    That is what the deployment says (`request_memory_gb`), or what the weights leave of the device.
    """
    stated = kwargs.get("request_memory_gb")
    if stated is not None:
        return int(float(stated) * _GIB)
    return None if device_bytes is None else max(0, device_bytes - sum(weight_bytes(folder).values()))


def check_memory(
    folder: PipelineFolder, call: PipelineCall, limit: int | None, *, tiled: bool = False
) -> None:
    """Refuse a request that does not fit.

    Raises:
        ClientError: the estimate is above the limit.
    """
    needed = request_bytes(folder, call, tiled=tiled)
    if limit is None or needed <= limit:
        return
    length = f" with {call.frames} frames" if call.frames > 1 else ""
    raise ClientError(
        f"{call.makes} of {call.width} x {call.height} pixels{length}: it needs about {needed / _GIB:.2f} "
        f"GiB beside the weights, and a request may take {limit / _GIB:.2f} GiB "
        "(model_kwargs.request_memory_gb): ask for a smaller one",
        code="memory_exceeded",
    )
