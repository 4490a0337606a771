"""Fed sequences: their inputs are rows that the node makes of a stream and of its last tokens (ADR 38)."""
