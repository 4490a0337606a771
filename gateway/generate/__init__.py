"""The native routes `/generate` and `/warm`: M*'s form and JSON, NDJSON and one document."""
