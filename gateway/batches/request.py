"""Parsing of `POST /v1/batches`."""

import re
from typing import Any, Final

import msgspec

from gateway.errors import InvalidParamError, NotSupportedError
from gateway.http.bodies import Metadata, check_names, converted
from shared.validation_errors import described

ENDPOINTS: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score",
    "/v1/images/generations",
)  # fmt: skip
"""The routes that lines may ask: those with a JSON body and a JSON answer."""
LONGEST_WINDOW_S: Final = 6 * 24 * 3600
_SHARE_OF_LOG: Final = 6 / 7
"""The longest window, as a share of the age at which events leave the log: its end must be seen there."""
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])", re.ASCII)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/batches`.

    Attributes:
        input_file_id: of a file with the lines, stored with `purpose` `batch`.
        endpoint: the route of all lines.
        completion_window: after it, lines without an answer get an error: `24h`, or another number of `s`,
            `m`, `h` or `d`.
        output_expires_after: not supported: the files of results expire as other files do.
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: Any = None


def parse(fields: dict[str, Any], max_age_s: float | None) -> tuple[BatchRequest, int]:
    """Return a batch's request, and its completion window in seconds.

    `max_age_s` is the age at which events leave the log; None: they do not.

    Raises:
        InvalidParamError: a field is unknown, missing or wrong.
    """
    check_names("body", fields, BatchRequest.__struct_fields__)
    body = converted(fields, BatchRequest)
    if body.endpoint not in ENDPOINTS:
        raise InvalidParamError(
            "endpoint",
            f"endpoint: expected one of {', '.join(ENDPOINTS)}, found {described(body.endpoint)}",
        )
    if body.output_expires_after is not None:
        raise NotSupportedError("output_expires_after", body.output_expires_after, "null")
    return body, _window_s(body.completion_window, max_age_s)


def _window_s(window: str, max_age_s: float | None) -> int:
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    longest = LONGEST_WINDOW_S if max_age_s is None else min(LONGEST_WINDOW_S, int(max_age_s * _SHARE_OF_LOG))
    if not 1 <= seconds <= longest:
        raise InvalidParamError(
            "completion_window",
            f"completion_window: expected 24h, or another number of s, m, h or d up to {longest} s, found "
            f"{described(window)}",
        )
    return seconds
