"""Pipelines of videos that run as one node: `graph`, `processing` and `nodes`."""
