"""Arenas: the memory that tensors are published from, on the host and on the GPU."""
