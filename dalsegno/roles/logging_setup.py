"""Log setup of a process: one line per record, in the same form for every role, as text or as a JSON object.

    2026-11-20 09:13:38.123 gateway INFO  listening on http://127.0.0.1:8000
    {"time":"2026-11-20T08:13:38.123Z","level":"info","role":"gateway","logger":"gateway.app","message":...}

A role under the launcher leaves its name out of text lines: the launcher puts it before every line, including
those that are not log records (a traceback, a library's print).

Text that clients wrote is left out unless `logs.prompts` is set: the code that logs a record marks the parts
that may be a client's (`shared.telemetry.log_fields`). Errors of other libraries, and errors raised while a
client's text was processed, are shown with their traceback and without their message.
"""

import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from textwrap import indent
from types import TracebackType
from typing import Any, Final, TypeAlias

from pythonjsonlogger.msgspec import MsgspecFormatter

from configs.deployment import LogSettings
from dalsegno.terminal.sanitise import plain
from shared.source_digest import PROJECT
from shared.telemetry import log_fields

_CHATTY: Final = ("asyncio", "httpx", "nats", "torch", "transformers", "urllib3", "uvicorn")
"""Libraries whose INFO records are of no use to an operator; `--log-level debug` shows them."""
OURS: Final = PROJECT
"""The packages of this project."""
_ABOUT: Final = ("may_quote", "is_prompt", "quoting")
_MOST_CHARS: Final = 10_000
_DEEPEST: Final = 16
HIDDEN: Final = "(its message may quote a client; logs.prompts shows it)"

_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


def set_up(settings: LogSettings, role: str | None = None) -> None:
    """Send this process's logs to stderr, with `role` in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings, role))
    if not settings.prompts:
        handler.addFilter(_is_no_prompt)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for logger in _CHATTY:
        logging.getLogger(logger).setLevel(logging.NOTSET if settings.level == "debug" else logging.WARNING)
    logging.captureWarnings(capture=True)


@contextmanager
def held_back() -> Iterator[list[logging.LogRecord]]:
    """Collect the log records from before `set_up`, for `repeat`; print them if the block fails."""
    handler = _Collector()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.records
    except BaseException:
        for record in handler.records:
            print(record.getMessage(), file=sys.stderr)
        raise
    finally:
        logging.getLogger().removeHandler(handler)


def repeat(records: Iterable[logging.LogRecord]) -> None:
    """Log the records that were held back."""
    for record in records:
        logging.getLogger(record.name).handle(record)


def print_last_message(text: str) -> None:
    """Print why this process ends: as plain text, or as a JSON object where every line is one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _ForPrograms):
            text = handler.formatter.format(
                logging.LogRecord(__name__, logging.CRITICAL, "", 0, "%s", (text,), None)
            )
    print(text, file=sys.stderr)


def formatter(settings: LogSettings, role: str | None) -> logging.Formatter:
    """Return the formatter for the configured format."""
    if settings.format == "json":
        return _ForPrograms(role, shows_quotations=settings.prompts)
    return _ForPeople(role, shows_quotations=settings.prompts)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: Final[list[logging.LogRecord]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class _ForPeople(logging.Formatter):
    """Text: a message is one line, whatever a client wrote into it; a traceback follows on its own lines."""

    default_msec_format = "%s.%03d"

    def __init__(self, role: str | None, *, shows_quotations: bool) -> None:
        name = f"{role} " if role else ""
        super().__init__(f"%(asctime)s {name}%(levelname)-5s %(message)s")
        self._shows_quotations = shows_quotations

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = plain(_message(record, shows_quotations=self._shows_quotations))
        name = log_fields.correlation()
        if name is not None:
            record.message += f" [{name}]"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        shown = _shown(record, shows_quotations=self._shows_quotations)
        if shown is None:
            return super().format(record)
        record.exc_text = "\n".join(plain(line) for line in shown.splitlines())
        try:
            return super().format(record)
        finally:
            record.exc_text = None  # another handler formats its own


class _ForPrograms(MsgspecFormatter):
    """One JSON object per line: `time`, `level`, `role`, `logger`, `message` and the extra fields."""

    def __init__(self, role: str | None, *, shows_quotations: bool) -> None:
        super().__init__()
        self._role = role
        self._shows_quotations = shows_quotations

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        log_data |= {
            "time": now.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **({"role": self._role} if self._role else {}),
            "logger": record.name,
            "message": _message(record, shows_quotations=self._shows_quotations),
        }
        name = log_fields.correlation()
        if name is not None:
            log_data["correlation"] = name
        more: dict[str, Any] = {}
        super().add_fields(more, record, {})
        log_data |= {key: value for key, value in more.items() if key not in {*log_data, *_ABOUT}}
        shown = _shown(record, shows_quotations=self._shows_quotations)
        if shown is not None:
            log_data["exception"] = shown

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802 - logging's name
        """Return nothing: `add_fields` adds the exception."""
        return ""


def _is_no_prompt(record: logging.LogRecord) -> bool:
    return not getattr(record, "is_prompt", False)


def _message(record: logging.LogRecord, *, shows_quotations: bool) -> str:
    message = record.getMessage()
    quoted = getattr(record, "quoting", None)
    if quoted is not None and shows_quotations:
        message = f"{message}: {quoted}"
    return message if len(message) <= _MOST_CHARS else f"{message[: _MOST_CHARS - 1]}…"


def _shown(record: logging.LogRecord, *, shows_quotations: bool) -> str | None:
    """Return a record's error with its traceback, or None if there is no error.

    Messages that may quote a client are left out.
    """
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return None
    may_quote = getattr(record, "may_quote", False) or record.name.partition(".")[0] not in OURS
    if shows_quotations or not may_quote:
        return "".join(traceback.format_exception(error)).rstrip()
    return "\n".join(_without_messages(error, 0))


def _without_messages(error: BaseException, depth: int) -> Iterator[str]:
    """Yield the traceback and the type of an error, its cause first."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and depth < _DEEPEST:
        yield from _without_messages(before, depth + 1)
        yield "from which followed:"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    yield f"{type(error).__qualname__}: {HIDDEN}"
    if isinstance(error, BaseExceptionGroup) and depth < _DEEPEST:
        for inner in error.exceptions:
            yield indent("\n".join(_without_messages(inner, depth + 1)), "  | ")
