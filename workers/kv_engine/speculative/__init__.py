"""Speculative decoding: drafts by a smaller model and their verification."""
