"""Measurements, each a module with a table for its output."""
