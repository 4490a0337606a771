"""Block diffusion models: LLaDA2, and dllm-hub's Qwen3 with attention in blocks (bd3lm)."""
