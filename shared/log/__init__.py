"""The event log: a port (`port`), its NATS JetStream adapter (`jetstream`) and its fake (`fake`)."""
