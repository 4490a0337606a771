"""The autoencoder of images in the layout of FLUX (`ae.safetensors`), as diffusers' `AutoencoderKL`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file

from models.bagel.folder import AE
from models.checkpoints.files import CheckpointError
from models.checkpoints.progress import Progress
from models.checkpoints.weights import Shard, read_shard
from models.transformers_lm.architecture import choose_dtype

SCALE: Final = 0.3611
SHIFT: Final = 0.1159
"""Latents of the language model are `SCALE * (latents - SHIFT)`, as published (`modeling/autoencoder.py`)."""
_GROUPS: Final = 32

Half = Literal["encoder", "decoder"]


def load_half(folder: Path, half: Half, *, device: str | torch.device, dtype: str, progress: Progress) -> Any:
    """Load one half of the autoencoder: the module of diffusers.

    `dtype` `auto` is bfloat16 on a GPU, where the published code computes so, and float32 on a CPU.

    Raises:
        CheckpointError: the file is missing or damaged, or holds another autoencoder.
    """
    shard, on = read_shard(folder / AE), torch.device(device)
    model = _empty(shard)
    chosen = choose_dtype("bfloat16" if dtype == "auto" and on.type == "cuda" else dtype, on, [shard])
    tensors = _converted(load_file(shard.path), model.config)
    wanted: torch.nn.Module = getattr(model, half)
    state = {
        name.removeprefix(f"{half}."): tensor.to(on, chosen)
        for name, tensor in tensors.items()
        if name.startswith(f"{half}.")
    }
    try:
        wanted.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in {shard.path} do not fit the {half} of an autoencoder of FLUX: {error}"
        ) from error
    progress(shard.nbytes, shard.nbytes, AE)
    return wanted.eval().requires_grad_(requires_grad=False)


def latent_channels_of(folder: Path) -> int:
    """The channels of the latents, by the header of `ae.safetensors`.

    Raises:
        CheckpointError: the file is missing or damaged, or holds another autoencoder.
    """
    return _shape(read_shard(folder / AE), "decoder.conv_in.weight")[1]


def _empty(shard: Shard) -> Any:
    """The autoencoder without memory, sized by the tensors of the file."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL  # noqa: PLC0415 - an extra

    levels = _count(shard, "encoder.down.{}.block.0.conv1.weight")
    widths = [_shape(shard, f"encoder.down.{level}.block.0.conv1.weight")[0] for level in range(levels)]
    with torch.device("meta"):
        return AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * levels,
            up_block_types=["UpDecoderBlock2D"] * levels,
            block_out_channels=widths,
            layers_per_block=_count(shard, "encoder.down.0.block.{}.conv1.weight"),
            latent_channels=_shape(shard, "decoder.conv_in.weight")[1],
            norm_num_groups=_GROUPS,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


def _converted(tensors: Mapping[str, torch.Tensor], config: Any) -> Mapping[str, torch.Tensor]:
    """The tensors under the names of diffusers."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint  # noqa: PLC0415 - an extra

    convert: Callable[..., Mapping[str, torch.Tensor]] = convert_ldm_vae_checkpoint
    return convert(dict(tensors), config)


def _count(shard: Shard, pattern: str) -> int:
    """The number of tensors that are numbered from 0."""
    number = 0
    while pattern.format(number) in shard.tensors:
        number += 1
    if not number:
        _shape(shard, pattern.format(0))
    return number


def _shape(shard: Shard, name: str) -> tuple[int, ...]:
    tensor = shard.tensors.get(name)
    if tensor is None or len(tensor.shape) != 4:
        raise CheckpointError(
            f"{shard.path}: expected the autoencoder of FLUX, with the convolution {name}, found "
            f"{'no such tensor' if tensor is None else f'the shape {tensor.shape}'}"
        )
    return tensor.shape
