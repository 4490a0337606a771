"""The weights that the node of a block diffusion model loads. No torch."""

from models.decoder_lm.weight_files import weight_files

__all__ = ["weight_files"]
