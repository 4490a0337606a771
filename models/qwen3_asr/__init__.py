"""Qwen3-ASR, speech to text: an encoder of sound, and a Qwen3 that tells the language before the text."""
