"""Cosmos3 under M*'s names of nodes: `graph`, `processing` and `nodes`."""
