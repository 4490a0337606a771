"""Random draws of a diffusion language model: a generator for each block."""

from hashlib import sha256

import torch

from models.programs import TokenRequest


def generator_of(request: TokenRequest, place: int, device: torch.device) -> torch.Generator:
    """Return the generator for the tokens from `place` on: a resumed answer draws as an uninterrupted one."""
    text = f"{request.seed}/{request.choice}/{place}"
    seed = int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1
    return torch.Generator(device).manual_seed(seed)
