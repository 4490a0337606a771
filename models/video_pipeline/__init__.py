"""Pipelines of diffusers that make videos, in parts: `graph`, `processing` and `nodes`."""
