"""Processes that share one node: group formation and the follower's process."""
