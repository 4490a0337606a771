"""The files that decide what Voxtral hears: weights, tokenizer, features. No torch."""

from models.whisper.weight_files import weight_files

__all__ = ["weight_files"]
