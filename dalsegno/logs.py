"""Logs: one line for people, the same from every role.

    2026-11-20 09:13:38.123 gateway INFO  listening on http://127.0.0.1:8000

A role that runs under the launcher leaves its name out: the launcher puts it before every line, also
before those that are not ours (a traceback, a library's print).
"""

import logging
import sys
from typing import Final

from dalsegno.plain import plain

_CHATTY: Final = ("asyncio", "httpx", "nats", "transformers", "urllib3", "uvicorn")
"""What these say at INFO is no news to an operator; `--log-level debug` lets them speak."""


def set_up(level: str, role: str | None = None) -> None:
    """Send this process's logs to stderr, from `level` on, with `role` in every line."""
    handler = logging.StreamHandler(sys.stderr)
    name = f"{role} " if role else ""
    formatter = _OneLine(f"%(asctime)s {name}%(levelname)-5s %(message)s")
    formatter.default_msec_format = "%s.%03d"
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for logger in _CHATTY:
        logging.getLogger(logger).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
    logging.captureWarnings(capture=True)


class _OneLine(logging.Formatter):
    """A message is one line, whatever a client wrote into it; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = plain(record.message)
        return super().formatMessage(record)
