"""`/generate`: M*'s form and JSON, NDJSON and one document."""
