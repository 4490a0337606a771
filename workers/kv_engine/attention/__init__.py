"""Attention over the paged KV cache: dispatch and kernels."""
