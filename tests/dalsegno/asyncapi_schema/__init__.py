"""AsyncAPI's own schema of AsyncAPI 3.0.0 documents (Apache-2.0), without its words of documentation."""
