"""Speculative decoding: tokens drafted by prompt lookup or a smaller model, and their verification."""
