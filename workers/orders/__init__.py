"""Orders read from the log, and edges that arrive before their order."""
