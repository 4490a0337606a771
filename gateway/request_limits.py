"""Caps: what this deployment's gateway lets a single request ask for (`gateway` in the configuration)."""

from typing import Final

from configs.deployment import GatewaySettings
from gateway.errors import InvalidParamError
from shared.events import Params

MAX_TIMEOUT_S: Final = 86400.0
"""A day: the longest a request may ask to be waited for."""
MAX_LINGER_S: Final = 600.0
"""Ten minutes: the longest a request may go on for a client that left."""


def check_params(params: Params, settings: GatewaySettings, name: str = "max_tokens") -> None:
    """Refuse an answer that is longer than allowed; `name` is what the client calls its limit.

    Raises:
        InvalidParamError: it is.
    """
    if params.max_tokens is not None and params.max_tokens > settings.max_tokens:
        raise InvalidParamError(
            name, f"{name}: expected at most {settings.max_tokens}, found {params.max_tokens}"
        )


def check_choices(prompts: int, n: int, settings: GatewaySettings) -> None:
    """Refuse more answers than allowed.

    Raises:
        InvalidParamError: they are more.
    """
    if prompts * n <= settings.max_choices:
        return
    most = f"expected at most {settings.max_choices} answers of one request"
    if prompts == 1:
        raise InvalidParamError("n", f"n: {most}, found {n}")
    raise InvalidParamError("prompt", f"prompt: {most}, found {prompts} prompts with {n} each")


def check_messages(count: int, settings: GatewaySettings) -> None:
    """Refuse a chat that is longer than allowed.

    Raises:
        InvalidParamError: it is.
    """
    if count > settings.max_messages:
        raise InvalidParamError(
            "messages", f"messages: expected at most {settings.max_messages} messages, found {count}"
        )


def limit_s(asked_s: float | None, settings: GatewaySettings) -> float | None:
    """How long a request may take: what it asks for, at most what is allowed; None is for ever."""
    allowed = [seconds for seconds in (asked_s, settings.request_timeout_s) if seconds]
    return min(allowed, default=None)


def check_linger(found: float | None) -> None:
    """Refuse a time to wait for a client that left, which is none.

    Raises:
        InvalidParamError: it is not from 0 to ten minutes.
    """
    if found is not None and not 0 <= found <= MAX_LINGER_S:
        raise InvalidParamError(
            "linger_s", f"linger_s: expected seconds from 0 to {MAX_LINGER_S:g}, found {found!r:.80}"
        )


def check_timeout(found: float | None) -> None:
    """Refuse a time limit that is none.

    Raises:
        InvalidParamError: it is not above 0 and at most a day.
    """
    if found is not None and not 0 < found <= MAX_TIMEOUT_S:
        raise InvalidParamError(
            "timeout_s",
            f"timeout_s: expected seconds above 0 and at most {MAX_TIMEOUT_S:g}, found {found!r:.80}",
        )
