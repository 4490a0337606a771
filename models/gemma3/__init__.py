"""Gemma 3 with images, whose tokens see one another in an image: `graph`, `processing` and `nodes`."""
