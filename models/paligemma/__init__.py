"""PaliGemma: SigLIP before Gemma, whose whole prompt sees itself: `graph`, `processing` and `nodes`."""
