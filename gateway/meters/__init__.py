"""The gateway's own counters: of its answers, and of the hops of its requests over the log."""
