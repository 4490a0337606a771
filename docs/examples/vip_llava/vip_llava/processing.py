"""The CPU node of ViP-LLaVA: images are written and resized as LLaVA's are."""

from models.llava.processing import load

__all__ = ["load"]
