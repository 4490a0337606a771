"""Bundles: one recorded request in a file that can be replayed anywhere."""
