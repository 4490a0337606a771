"""Pipelines of diffusers that draw images, in parts: `graph`, `processing` and `nodes`."""
