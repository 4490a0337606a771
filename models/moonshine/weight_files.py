"""The files that decide what Moonshine hears: weights, tokenizer, and the settings of features. No torch."""

from models.whisper.weight_files import weight_files

__all__ = ["weight_files"]
