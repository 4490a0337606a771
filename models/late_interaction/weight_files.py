"""The weights that the node of a late-interaction model loads: those of a text encoder's folder. No torch."""

from models.text_encoder.weight_files import weight_files

__all__ = ["weight_files"]
