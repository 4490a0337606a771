"""Qwen3.5: images and videos before layers of gated delta attention: `graph`, `processing` and `nodes`."""
