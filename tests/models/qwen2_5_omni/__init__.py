"""Tests of Qwen2.5-Omni."""
