"""Preparation of JSON schemas for llguidance: `prepare.py` is the entry. Pure; imports no llguidance."""
