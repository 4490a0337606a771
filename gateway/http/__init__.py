"""The HTTP server below ASGI: socket, connections, parser and time limits; and request bodies."""
