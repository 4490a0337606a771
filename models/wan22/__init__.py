"""Wan2.2 under M*'s names of nodes: `graph`, `processing` and `nodes`."""
