"""Sound in answers: audio encoders, and the names of voices."""
