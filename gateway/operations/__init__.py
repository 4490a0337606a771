"""Routes for operators: health, metrics, version, and the status and cancel of a request."""
