"""How another worker's bytes are reached: one module each, one contract suite for all."""
