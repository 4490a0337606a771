"""Decoder-only language models: Llama, Qwen3 and all others that use transformers' `AttentionInterface`."""
