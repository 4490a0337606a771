"""The files that decide what Qwen3-ASR hears: weights, tokenizer, template, features. No torch."""

from models.whisper.weight_files import weight_files

__all__ = ["weight_files"]
