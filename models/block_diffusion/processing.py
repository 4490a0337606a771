"""The CPU node of block diffusion models; see `models.diffusion_text.processing`."""

from models.diffusion_text.processing import load

__all__ = ["load"]
