"""Execution of one order: its walks, node calls, output tracks and recovery."""
