"""Routes for operators: health, metrics, version, request status, prefix warm-up."""
