"""Transports: access to other workers' arenas, one module each, with one contract test suite for all."""
