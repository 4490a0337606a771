"""Whisper, speech to text: windows of 30 s through an encoder, and a decoder that writes text and times."""
