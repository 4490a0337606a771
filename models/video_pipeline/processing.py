"""The CPU nodes (`models.diffusion_pipelines.processing`)."""

from typing import Final

from models.diffusion_pipelines.options import VideoOptions
from models.diffusion_pipelines.processing import ProcessingLoader

load: Final = ProcessingLoader(VideoOptions)
