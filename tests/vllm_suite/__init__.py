"""vLLM's own tests of the routes that we share, run against this server."""
