"""Configuration from file, environment and flags, and `dalsegno config`."""
