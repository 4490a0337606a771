"""Checkpoint folders: files, claims, integrity of weights, the local hub cache. No torch."""
