"""Model families, one folder each, with three faces: `graph`, `processing` and `nodes`."""
