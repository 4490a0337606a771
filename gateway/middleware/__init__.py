"""What a request passes before its route, a module each; `front` says which, and in which order."""
