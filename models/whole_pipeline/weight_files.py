"""The files of the nodes (`models.diffusion_pipelines.weight_files`)."""

from models.diffusion_pipelines.weight_files import weight_files

__all__ = ["weight_files"]
