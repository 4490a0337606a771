"""The log's capacity for readers, and the share of it at which operators are warned. Pure."""

from typing import Final

from shared.log.port import LogState

ALARM_SHARE: Final = 0.8


def reader_alarm(state: LogState) -> str:
    """Return a warning if the log has nearly as many readers as it may have; else an empty text."""
    if state.max_consumers is None or state.consumers < ALARM_SHARE * state.max_consumers:
        return ""
    return (
        f"the log has {state.consumers} of {state.max_consumers} readers: use one reader per service, "
        "not one per request, or raise nats.max_consumers"
    )
