"""Orders of the conductor: the fold of the log that selects them, and edges that arrive before them."""
