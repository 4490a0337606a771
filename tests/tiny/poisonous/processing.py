"""The CPU face: that of any decoder-only language model."""

from models.decoder_lm.processing import load

__all__ = ["load"]
