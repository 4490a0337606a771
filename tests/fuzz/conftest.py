"""A second demo deployment: other tests do not share the damage."""

from tests.e2e.conftest import deployment

__all__ = ["deployment"]
