"""The CPU node: that of language models."""

from models.decoder_lm.processing import load

__all__ = ["load"]
