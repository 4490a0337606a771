"""Loading at start: models, engines, prefixes to warm."""
