"""Mistral 3: Pixtral's tower, whose patches are merged, before Mistral. `graph`, `processing` and `nodes`."""
