"""Parakeet with a CTC head, speech to text: an encoder that says a token, or none, for each 80 ms."""
