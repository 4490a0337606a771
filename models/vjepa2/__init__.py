"""V-JEPA 2: a video or an image in, features out. `graph`, `processing` and `nodes`."""
