"""The CPU face: that of any decoder-only language model."""

from shared.models.decoder_lm.processing import load

__all__ = ["load"]
