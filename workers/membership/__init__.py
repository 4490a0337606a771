"""A rank's incarnation on the log: joining, heartbeats, peers, the event writer."""
