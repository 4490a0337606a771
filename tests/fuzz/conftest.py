"""The demo's deployment, a second time: damage is not shared with the other tests."""

from tests.e2e.conftest import deployment

__all__ = ["deployment"]
