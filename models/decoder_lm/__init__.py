"""Decoder-only language models: Llama, Qwen3, and whatever else goes through `AttentionInterface`."""
