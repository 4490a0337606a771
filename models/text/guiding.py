"""`Guiding`: the protocol of processings that compile guides for a KV node. It imports no llguidance."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from models.base import Processing

if TYPE_CHECKING:
    from models.text.guides import GuideCompiler


@runtime_checkable
class Guiding(Processing, Protocol):
    """A `Processing` that compiles guides; `workers.guides` calls the compiler in threads of its own."""

    @property
    def guides(self) -> "GuideCompiler | None":
        """The compiler for the model's vocabulary, which blocks and is thread-safe; None if there is none."""
        ...
