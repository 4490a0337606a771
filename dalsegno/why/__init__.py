"""`dalsegno why`: explains where the time of a recorded request went, and how it ended."""
