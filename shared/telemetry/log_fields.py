"""What a line for the operator carries beside its words: what it is about, and what of it quotes a client.

Lines are written by `logging`, shaped by `dalsegno.roles.logging_setup`. Prompts are nobody's business
there, unless the
operator says so (`logs.prompts`); errors, too, quote what clients wrote. So whoever writes a line says what
in it may be a client's:

    _LOGGER.warning("record %d is no event", seq, extra=quoting(str(error)))     the quotation is left out
    _LOGGER.exception("step %s failed", key, extra=MAY_QUOTE)                    the errors' messages are
    _LOGGER.info("request %s asks %r", id, inputs, extra=PROMPT)                 the whole line is
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

MAY_QUOTE: Final[dict[str, Any]] = {"may_quote": True}
"""For a line with a traceback whose errors may quote a client."""
PROMPT: Final[dict[str, Any]] = {"is_prompt": True}
"""For a line that says what a client wrote, and nothing else of interest."""

_CORRELATION: Final[ContextVar[tuple[str | None, bool]]] = ContextVar("correlation", default=(None, False))


def quoting(text: str) -> dict[str, Any]:
    """For a line that goes on with words of a client's, `text`."""
    return {"quoting": text}


def correlation() -> str | None:
    """What the request is called that is worked for now: by its client, or by us for want of that."""
    return _CORRELATION.get()[0]


def client_correlation() -> str | None:
    """What its client calls it; None where it did not say."""
    name, is_told = _CORRELATION.get()
    return name if is_told else None


@contextmanager
def correlated(name: str, *, is_told: bool) -> Iterator[None]:
    """Within the block, and in tasks begun in it, all is done for the request that is called `name`."""
    token = _CORRELATION.set((name, is_told))
    try:
        yield
    finally:
        _CORRELATION.reset(token)
