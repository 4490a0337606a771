"""Idefics3: an image as rows and columns of tiles, before Llama. `graph`, `processing` and `nodes`."""
