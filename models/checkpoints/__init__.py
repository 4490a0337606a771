"""Checkpoint folders: files, weights, integrity, the local hub cache. No torch."""
