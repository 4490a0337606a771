"""Tensor parallelism inside the engine: leader, followers, collectives."""
