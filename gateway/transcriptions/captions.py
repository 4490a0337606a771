"""Captions: segments of speech as SubRip (`.srt`) and WebVTT (`.vtt`) files. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

_HOUR_MS: Final = 3_600_000
_MINUTE_MS: Final = 60_000


def srt(segments: Iterable[Mapping[str, Any]]) -> str:
    """Return a SubRip file; segments have `start` and `end` in seconds, and a `text`."""
    cues = (
        f"{number}\n{_time(one['start'], ',')} --> {_time(one['end'], ',')}\n{text}\n\n"
        for number, (one, text) in enumerate(_spoken(segments), 1)
    )
    return "".join(cues)


def vtt(segments: Iterable[Mapping[str, Any]]) -> str:
    """Return a WebVTT file (W3C), whose text has no markup."""
    cues = (
        f"{_time(one['start'], '.')} --> {_time(one['end'], '.')}\n{_escaped(text)}\n\n"
        for one, text in _spoken(segments)
    )
    return "".join(["WEBVTT\n\n", *cues])


def _spoken(segments: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], str]]:
    """The segments that have a text, on one line: an empty line would end a cue, and an arrow begin one."""
    for one in segments:
        if text := " ".join(one["text"].split()).replace("-->", "->"):
            yield one, text


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, point: str) -> str:
    """`00:01:02,500`, or with another decimal point."""
    whole = round(seconds * 1000)
    hours, rest = divmod(whole, _HOUR_MS)
    minutes, rest = divmod(rest, _MINUTE_MS)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
