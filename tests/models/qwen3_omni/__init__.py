"""Tests of Qwen3-Omni."""
