"""Code that several roles share: events and subjects, the walk language and plans, the log, and telemetry.

Nothing here imports the gateway, the conductor or the workers.
"""
