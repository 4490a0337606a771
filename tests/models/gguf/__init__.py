"""Tests of `models.gguf`."""
