"""`Guiding`: the protocol of processings that compile guides for a KV node. Imports no llguidance."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shared.events import Guide

if TYPE_CHECKING:
    from models.text.guides import CompiledGuide


@runtime_checkable
class Guiding(Protocol):
    """A `models.base.Processing` that compiles guides."""

    def compiled(self, guide: Guide) -> "CompiledGuide":
        """Compile a guide that `prepare` has accepted. It may block; workers call it in a thread."""
        ...
