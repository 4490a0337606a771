"""The CPU face: that of Orpheus."""

from models.orpheus.processing import load

__all__ = ["load"]
