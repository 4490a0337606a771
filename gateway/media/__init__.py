"""Media of requests: where they come from, and how they get into the store."""
