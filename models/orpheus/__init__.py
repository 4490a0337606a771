"""Orpheus: text to speech. A Llama says audio tokens, and SNAC makes them sound while it still speaks."""
