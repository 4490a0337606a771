"""The weights that the nodes of CSM load: parts of the checkpoint's files. No torch."""

from models.vision_language.weight_files import weight_files

__all__ = ["weight_files"]
