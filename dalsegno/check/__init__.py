"""`dalsegno check`: validates a configuration and shows its placement without starting it."""
