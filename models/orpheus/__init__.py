"""Orpheus, text to speech: a Llama generates audio tokens, and SNAC decodes them concurrently."""
