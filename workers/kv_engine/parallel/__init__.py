"""Tensor parallelism inside the engine: leader, followers, connections and collectives."""
