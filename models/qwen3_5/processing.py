"""The CPU node of Qwen3.5: prompts, images and videos as Qwen3-VL's processor prepares them."""

from models.qwen3_vl.processing import load

__all__ = ["load"]
