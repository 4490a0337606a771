"""Orpheus with a vocoder that stands still while a certain file exists. For tests alone."""
