"""A rank's incarnation on the log: join, heartbeats, the incarnations of other ranks, the event writer."""
