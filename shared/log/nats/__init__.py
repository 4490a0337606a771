"""The event log on NATS JetStream."""
