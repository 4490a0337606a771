"""Media of requests in a worker: local copies, and decoder processes."""
