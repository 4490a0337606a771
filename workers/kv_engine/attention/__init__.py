"""Attention over the paged KV pool: the pool, the choice of a kernel, and the kernels."""
