"""Pipelines of diffusers: folders with a `model_index.json`, for images and videos."""
