"""Workers: one process per rank; each runs the nodes placed on it."""
