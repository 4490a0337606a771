"""Arenas: the memory that tensors are published from, on hosts and on GPUs."""
