"""Limits of the fields of one request: those that the gateway's settings give, and fixed ranges of times."""

from typing import Final

from configs.deployment import GatewaySettings
from gateway.errors import InvalidParamError
from shared.events import Inputs, Params

MAX_TIMEOUT_S: Final = 86400.0
"""A day: the longest time limit of a request."""
MAX_DISCONNECT_GRACE_S: Final = 600.0
"""Ten minutes: the longest time for which a request continues without a client."""


def check_params(params: Params, settings: GatewaySettings, name: str = "max_tokens") -> None:
    """Check the limit of the answer's tokens; `name` is the field in which the client sent it.

    Raises:
        InvalidParamError: it is above the gateway's `max_tokens`.
    """
    if params.max_tokens is not None and params.max_tokens > settings.max_tokens:
        raise InvalidParamError(
            name, f"{name}: expected at most {settings.max_tokens}, found {params.max_tokens}"
        )


def check_choices(prompts: int, n: int, settings: GatewaySettings) -> None:
    """Check the number of answers.

    Raises:
        InvalidParamError: it is above the gateway's `max_choices`.
    """
    if prompts * n <= settings.max_choices:
        return
    most = f"expected at most {settings.max_choices} answers of one request"
    if prompts == 1:
        raise InvalidParamError("n", f"n: {most}, found {n}")
    raise InvalidParamError("prompt", f"prompt: {most}, found {prompts} prompts with {n} each")


def check_messages(count: int, settings: GatewaySettings) -> None:
    """Check the number of a chat's messages.

    Raises:
        InvalidParamError: it is above the gateway's `max_messages`.
    """
    if count > settings.max_messages:
        raise InvalidParamError(
            "messages", f"messages: expected at most {settings.max_messages} messages, found {count}"
        )


def check_texts(inputs: Inputs, settings: GatewaySettings) -> None:
    """Check the number of texts in one request.

    Raises:
        InvalidParamError: it is above the gateway's `max_documents` or `max_embeddings`.
    """
    name = "max_documents" if inputs.queries else "max_embeddings"
    most, found = getattr(settings, name), len(inputs.texts or [])
    if found > most:
        raise InvalidParamError(
            "texts", f"texts: expected at most {most} texts in one request (gateway.{name}), found {found}"
        )


def time_limit_s(timeout_s: float | None, settings: GatewaySettings) -> float | None:
    """The time limit of a request: its own or the gateway's, whichever is less; None is unlimited."""
    limits = [seconds for seconds in (timeout_s, settings.request_timeout_s) if seconds]
    return min(limits, default=None)


def check_disconnect_grace(seconds: float | None) -> None:
    """Check the disconnect grace, the field `linger_s`.

    Raises:
        InvalidParamError: it is not from 0 to ten minutes.
    """
    if seconds is not None and not 0 <= seconds <= MAX_DISCONNECT_GRACE_S:
        raise InvalidParamError(
            "linger_s",
            f"linger_s: expected seconds from 0 to {MAX_DISCONNECT_GRACE_S:g}, found {seconds!r:.80}",
        )


def check_timeout(seconds: float | None) -> None:
    """Check the time limit, the field `timeout_s`.

    Raises:
        InvalidParamError: it is not above 0 and at most a day.
    """
    if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidParamError(
            "timeout_s",
            f"timeout_s: expected seconds above 0 and at most {MAX_TIMEOUT_S:g}, found {seconds!r:.80}",
        )
