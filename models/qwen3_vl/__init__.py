"""Qwen3-VL: images and videos of any size before Qwen3: `graph`, `processing` and `nodes`."""
