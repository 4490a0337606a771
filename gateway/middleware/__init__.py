"""The ASGI middleware that every HTTP request passes before its route; `stack` has the order."""
