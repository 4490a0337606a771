"""Execution of orders on one rank: walks, node calls, output tracks, recovery of earlier output."""
