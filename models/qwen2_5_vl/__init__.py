"""Qwen2.5-VL and Qwen2-VL: images and videos of any size before Qwen2: `graph`, `processing` and `nodes`."""
