"""The conductor's decisions: a pure fold over the log, without I/O, clock or random numbers."""
