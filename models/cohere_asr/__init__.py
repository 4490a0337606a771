"""Cohere Transcribe, speech to text: a Conformer, and a decoder that is told the language."""
