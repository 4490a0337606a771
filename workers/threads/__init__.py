"""Hand-over between the event loop and engine threads."""
