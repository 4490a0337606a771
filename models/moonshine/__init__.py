"""Moonshine, speech to text: an encoder of samples, as long as they are, and a decoder."""
