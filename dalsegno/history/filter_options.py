"""The options of `dalsegno log` that choose requests, and the filter that they make."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import click

from dalsegno.history.request_filter import KINDS, RequestFilter
from dalsegno.history.summary import EVER_NS, OUTCOMES

_F = TypeVar("_F", bound=Callable[..., Any])
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_LONGEST_S: Final = 1e9
_MAX_RANK: Final = 1_000_000


class _Duration(click.ParamType[float]):
    """A time span in seconds: `200ms`, `1.5s`, `30m`, `2h`, `7d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _duration_s(str(value))
        if found is None:
            self.fail(f"{value!r}: expected a duration such as 200ms, 1.5s, 30m, 2h or 7d", param, ctx)
        return found


class _Moment(click.ParamType[int]):
    """A time in nanoseconds since 1970: ISO 8601, or a duration before now."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value)
        if (ago_s := _duration_s(text)) is not None:
            return time.time_ns() - int(ago_s * 1e9)
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{text!r}: expected a time such as 2026-11-20T12:35:03Z (UTC if it names no zone), or a "
                "duration before now such as 30m, 2h or 7d",
                param,
                ctx,
            )
        at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        return int(at.timestamp()) * 1_000_000_000 + at.microsecond * 1000


def _duration_s(text: str) -> float | None:
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else None
    return seconds if seconds is not None and seconds <= _LONGEST_S else None


def _rank_of(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_RANK)) else None


def _exclusions(
    ctx: click.Context, parameter: click.Parameter, given: Sequence[str]
) -> Mapping[str, list[object]]:
    """Parse `--not KIND=VALUE`."""
    found: dict[str, list[object]] = {}
    for text in given:
        kind, is_pair, value = text.partition("=")
        if kind not in KINDS or not is_pair:
            raise click.BadParameter(f"{text!r}: expected KIND=VALUE, with the kind {', '.join(KINDS)}")
        if kind == "outcome" and value not in OUTCOMES:
            raise click.BadParameter(f"{text!r}: expected the outcome {', '.join(OUTCOMES)}")
        rank = _rank_of(value) if kind == "rank" else None
        if kind == "rank" and rank is None:
            raise click.BadParameter(f"{text!r}: expected a rank: 0, 1, ...")
        found.setdefault(kind, []).append(value if rank is None else rank)
    return found


_OPTIONS: Final = (
    click.option(
        "--outcome", type=click.Choice(OUTCOMES), multiple=True, help="Requests that ended so, or are open."
    ),
    click.option("--code", multiple=True, help="Failed or rejected with this error code."),
    click.option("--tenant", multiple=True, help="Of the API key of this name."),
    click.option("--model", multiple=True, help="Of this model."),
    click.option(
        "--rank", type=click.IntRange(0, _MAX_RANK), multiple=True, help="This rank got an order of it."
    ),
    click.option(
        "--since", type=_Moment(), metavar="TIME", help="Submitted then or later: 2026-11-20T12:35Z, or 2h."
    ),
    click.option("--until", type=_Moment(), metavar="TIME", help="Submitted before."),
    click.option(
        "--slower-than",
        type=_Duration(),
        metavar="DURATION",
        help="It took longer, e.g. 1.5s; an open one, so far.",
    ),
    click.option("--faster-than", type=_Duration(), metavar="DURATION", help="It took less."),
    click.option("--text", multiple=True, help="The prompt contains it, in any case; all of several."),
    click.option(
        "--not",
        "exclusions",
        metavar="KIND=VALUE",
        multiple=True,
        callback=_exclusions,
        help=f"Leave out requests with it; KIND is {', '.join(KINDS)}.",
    ),
)


def of_requests(command: _F) -> _F:
    """Options that choose requests; `filter_of` takes them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def filter_of(
    *,
    since: int | None,
    until: int | None,
    slower_than: float | None,
    faster_than: float | None,
    text: tuple[str, ...],
    exclusions: Mapping[str, list[object]],
    **chosen: tuple[object, ...],
) -> RequestFilter:
    """Return the filter of the options' values.

    Raises:
        click.UsageError: no request can be chosen.
    """
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since is not before --until: no request can be between them")
    if slower_than is not None and faster_than is not None and slower_than >= faster_than:
        raise click.UsageError("--slower-than is not below --faster-than: no request can be between them")
    texts = [*text, *exclusions.get("text", [])]
    if not all(str(one).strip() for one in texts):
        raise click.UsageError("expected a text to look for in prompts, found an empty one")
    return RequestFilter(
        chosen={kind: frozenset(values) for kind, values in chosen.items() if values},
        excluded={kind: frozenset(values) for kind, values in exclusions.items() if kind != "text"},
        texts=text,
        excluded_texts=tuple(map(str, exclusions.get("text", []))),
        since_ns=since if since is not None else 0,
        until_ns=until if until is not None else EVER_NS,
        slower_than_s=slower_than,
        faster_than_s=faster_than,
    )
