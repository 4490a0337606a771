"""Structured fields of log records: the request's name, and marks on text that quotes a client.

`logging` writes the records, and `dalsegno.roles.logging_setup` formats them. Prompts do not appear in the
log unless the operator configures it (`logs.prompts`). Errors quote clients as well. So each call marks the
part that may quote a client, which is then left out:

    _LOGGER.warning("record %d is no event", seq, extra=quoting(str(error)))     the quotation
    _LOGGER.exception("step %s failed", key, extra=MAY_QUOTE)                    the exceptions' messages
    _LOGGER.info("request %s asks %r", id, inputs, extra=PROMPT)                 the whole record
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

MAY_QUOTE: Final[dict[str, Any]] = {"may_quote": True}
"""Marks a record with a traceback whose exceptions may quote a client."""
PROMPT: Final[dict[str, Any]] = {"is_prompt": True}
"""Marks a record that only shows a client's text."""

_CORRELATION: Final[ContextVar[tuple[str | None, bool]]] = ContextVar("correlation", default=(None, False))


def quoting(text: str) -> dict[str, Any]:
    """Return the mark for a record followed by `text`, which may quote a client."""
    return {"quoting": text}


def correlation() -> str | None:
    """Return the current request's name: the client's, or else our own."""
    return _CORRELATION.get()[0]


def client_correlation() -> str | None:
    """Return the client's name for the current request; None if the client gave none."""
    name, is_clients = _CORRELATION.get()
    return name if is_clients else None


@contextmanager
def correlated(name: str, *, is_clients: bool) -> Iterator[None]:
    """Set the current request's name within the block and in tasks started there.

    `is_clients`: the client chose the name.
    """
    token = _CORRELATION.set((name, is_clients))
    try:
        yield
    finally:
        _CORRELATION.reset(token)
