"""The weights that the nodes of Qwen3.5 load. No torch."""

from models.vision_language.weight_files import weight_files

__all__ = ["weight_files"]
