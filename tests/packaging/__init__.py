"""Checks of the built wheel and sdist, run by `make test-packages` and by CI."""
