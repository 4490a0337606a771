"""The torch nodes (`models.diffusion_pipelines.nodes`)."""

from models.diffusion_pipelines.nodes import load

__all__ = ["load"]
