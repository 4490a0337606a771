"""Seals of the log: the leader's task that writes them, and the anchors outside of the log (ADR 25)."""
