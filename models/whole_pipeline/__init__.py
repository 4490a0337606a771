"""Pipelines of images that run as one node: `graph`, `processing` and `nodes`."""
