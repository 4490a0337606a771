"""SNAC, the vocoder of Orpheus: loading of its checkpoint, and reproducible decoding of codes to sound.

The modules are those of the package `snac`. Two kinds are replaced by equivalent ones: noise comes from
generators that the caller seeds, and nothing is compiled, because compiled code changes the last bits of a
sound as it warms up.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize

from models.checkpoints.files import CheckpointError, read_json
from models.checkpoints.weights import SINGLE, read_shard
from models.orpheus.frames import CODES, FRAME_SAMPLES, LEVELS, SAMPLE_RATE
from models.orpheus.weight_files import PICKLE

_HOP: Final = FRAME_SAMPLES // len(LEVELS[-1])
"""Samples per code of the finest level."""


class Snac:
    """The decoder on its device, in float32. Not thread-safe."""

    def __init__(self, model: Any) -> None:
        self._quantizer = model.quantizer
        self._decoder = model.decoder
        self._noise = _Noise()
        _replace(model.decoder, "Snake1d", _Snake)
        _replace(model.decoder, "NoiseBlock", lambda block: _NoiseBlock(block, self._noise))
        self.device: Final[torch.device] = next(model.decoder.parameters()).device

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        """Decode windows of whole frames: (B, frames, 7) codes to (B, frames * 2048) samples in -1..1.

        The noise of a row equals that of the package on a CPU after `torch.manual_seed` with the row's seed.
        Rows without a seed have no noise.
        """
        codes = codes.to(self.device)
        levels = [codes[:, :, list(places)].flatten(1) for places in LEVELS]
        self._noise.begin(seeds)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            sound: torch.Tensor = self._decoder(self._quantizer.from_codes(levels))
        return sound[:, 0]


class _Noise:
    """One generator per row of the current forward, on the CPU: the noise is equal on every device."""

    def __init__(self) -> None:
        self._generators: list[torch.Generator] = []

    def begin(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """The next noise for `like` (B, channels, samples): (B, 1, samples)."""
        drawn = torch.zeros(len(like), 1, like.shape[2])
        for row, generator in enumerate(self._generators):
            drawn[row] = torch.randn(1, like.shape[2], generator=generator)
        return drawn.to(like.device)


class _NoiseBlock(nn.Module):
    """The package's `NoiseBlock` with seeded noise, scaled by a mix of the channels."""

    def __init__(self, block: Any, noise: _Noise) -> None:
        super().__init__()
        self._mix = block.linear
        self._noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self._mix(x)
        return x + self._noise.draw(x) * mixed


class _Snake(nn.Module):
    """The package's `Snake1d`, x + sin(a x)^2 / a, not compiled."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self._alpha: torch.Tensor = block.alpha
        self._scale: torch.Tensor = (block.alpha + 1e-9).reciprocal()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._scale * torch.sin(self._alpha * x).pow(2)


def _replace(model: nn.Module, name: str, make: Callable[[Any], nn.Module]) -> None:
    """Replace all modules of the class `name`."""
    for parent in list(model.modules()):
        for child_name, child in parent.named_children():
            if type(child).__name__ == name:
                setattr(parent, child_name, make(child))


# ---- the checkpoint --------------------------------------------------------------------------------


def load_snac(folder: Path, device: torch.device) -> "Snac":
    """Load the decoder from a SNAC folder: `config.json` and weights.

    The weights are safetensors or, as published, a pickle, which is loaded with `weights_only`.

    Raises:
        CheckpointError: a file is missing or damaged, or the SNAC has other settings than that of Orpheus.
    """
    path = folder / "config.json"
    config = read_json(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses deprecated functions of torch at import
        from snac import SNAC as Model  # noqa: N811, PLC0415 - slow; only for this node
    try:
        model = Model(**config)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"{path} makes no SNAC: {type(error).__name__}: {error}") from error
    strides = [len(LEVELS[-1]) // len(places) for places in LEVELS]
    expected = {
        "sampling_rate": (SAMPLE_RATE, model.sampling_rate),
        "codebook_size": (CODES, model.codebook_size),
        "vq_strides": (strides, list(model.vq_strides)),
        "samples per code": (_HOP, int(torch.tensor(model.decoder_rates).prod())),
    }
    for name, (wanted, found) in expected.items():
        if wanted != found:
            raise CheckpointError(f"{path} is not the SNAC of Orpheus: {name} is {found}, expected {wanted}")
    try:
        model.load_state_dict(_weights(folder))
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {folder} do not fit its config.json: {error}") from error
    del model.encoder
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")  # computed once instead of in every forward
    return Snac(model.eval().requires_grad_(requires_grad=False).to(device))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / SINGLE).is_file():
        read_shard(folder / SINGLE)  # raises if it is damaged
        tensors: dict[str, torch.Tensor] = load_file(folder / SINGLE)
        return tensors
    path = folder / PICKLE
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no weights: expected {SINGLE} or {PICKLE}: {error.strerror}"
        ) from error
    except Exception as error:  # its errors are not documented
        raise CheckpointError(
            f"{path} cannot be read: expected only tensors, found {type(error).__name__}: {str(error)[:200]}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} cannot be read: expected named tensors, found {type(found).__name__}")
    return found
