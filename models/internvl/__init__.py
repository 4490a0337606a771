"""InternVL: an image as tiles and a thumbnail, before a language model: `graph`, `processing`, `nodes`."""
