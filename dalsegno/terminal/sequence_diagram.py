"""Boxes side by side with arrows between their lifelines, as plain text of at most 80 columns. Pure.

┌─ rank 0 ───────────────────┐   ┌─ rank 1 ───────────────────┐
│ cuda:0                     │   │ cuda:1                     │
│ LLM  prefill               │   │ LLM  decode                │
└─────────────┬──────────────┘   └─────────────┬──────────────┘
              ├══════════ KV of LLM ══════════►│
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 80
_GAP: Final = 3
_MOST: Final = 4
"""The most boxes in a row; more are stacked."""
_CROSSED: Final = {"═": "╪", "─": "┼", "┄": "┼"}


@dataclass(frozen=True, slots=True)
class Box:
    """A title, a note below it, and lines of a name and a remark each."""

    title: str
    note: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two boxes, given by their indices; `shaft` is its character."""

    source: int
    target: int
    label: str
    shaft: str = "─"


def draw(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> list[str]:
    """Return the lines of the drawing."""
    width = (WIDTH - _GAP * (len(boxes) - 1)) // len(boxes)
    if len(boxes) == 1 or len(boxes) > _MOST or width < max(map(_least, boxes)):
        same = max(map(_natural, boxes))
        return [line for box in boxes for line in _box(box, same)] + _listed(boxes, arrows)
    drawn = [_box(box, width, is_held=bool(arrows)) for box in boxes]
    height = max(map(len, drawn))
    rows = zip(*(_stretched(lines, height) for lines in drawn), strict=True)
    middles = [(width + _GAP) * place + (width - 1) // 2 for place in range(len(boxes))]
    return [(" " * _GAP).join(parts) for parts in rows] + [_arrow(arrow, middles) for arrow in arrows]


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the words of `text` in lines of at most `width`; a longer word gets a line to itself.

    An arrow within the text stays with the word after it.
    """
    line = ""
    for word in _words(text):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


def _words(text: str) -> list[str]:
    return re.findall(r"► \S+|\S+", text)


def _natural(box: Box) -> int:
    """The width that a box needs to wrap nothing."""
    name = max(len(name) for name, _ in box.lines)
    inside = max(name + 2 + len(remark) for _, remark in box.lines)
    return min(WIDTH, max(len(box.title) + 2, len(box.note), inside) + 4)


def _least(box: Box) -> int:
    """The least width that a box can have."""
    words = (len(word) + 6 for _, remark in box.lines for word in _words(remark))
    return max(len(box.title) + 6, *(len(name) + 4 for name, _ in box.lines), *words)


def _box(box: Box, width: int, *, is_held: bool = False) -> list[str]:
    inside = width - 4
    texts = [*wrapped(box.note, inside), *_wrapped(box, inside)]
    bottom = "─" * (width - 2)
    if is_held:
        middle = (width - 1) // 2 - 1
        bottom = f"{bottom[:middle]}┬{bottom[middle + 1 :]}"
    top = f"┌─ {box.title} {'─' * (width - len(box.title) - 5)}┐"
    return [top, *(f"│ {line:<{inside}} │" for line in texts), f"└{bottom}┘"]


def _wrapped(box: Box, inside: int) -> Iterator[str]:
    """Yield names in a column and remarks right of them, or below if two columns do not fit."""
    name_width = max(len(name) for name, _ in box.lines)
    remark_width = inside - name_width - 2
    for name, remark in box.lines:
        if remark_width >= max((len(word) for word in _words(remark)), default=0):
            for number, text in enumerate(wrapped(remark, remark_width)):
                yield f"{'' if number else name:<{name_width}}  {text}"
        else:
            yield name
            yield from (f"  {text}" for text in wrapped(remark, inside - 2))


def _stretched(lines: list[str], height: int) -> list[str]:
    """Return the box with empty lines added inside, up to `height`."""
    empty = f"│{' ' * (len(lines[0]) - 2)}│"
    return [*lines[:-1], *[empty] * (height - len(lines)), lines[-1]]


def _arrow(arrow: Arrow, middles: Sequence[int]) -> str:
    row = [" "] * (middles[-1] + 1)
    for middle in middles:
        row[middle] = "│"
    left, right = sorted((middles[arrow.source], middles[arrow.target]))
    for column in range(left + 1, right):
        row[column] = _CROSSED[arrow.shaft] if column in middles else arrow.shaft
    forward = arrow.source < arrow.target
    row[left], row[right] = ("├", "│") if forward else ("│", "┤")
    row[right - 1 if forward else left + 1] = "►" if forward else "◄"
    first = next((middle for middle in middles if left < middle), right)  # the next lifeline
    room = first - left - 5
    label = arrow.label if len(arrow.label) <= room else f"{arrow.label[: room - 1]}…"
    if room > 1:
        start = left + 1 + (first - left - len(label) - 2) // 2
        row[start : start + len(label) + 2] = f" {label} "
    return "".join(row).rstrip()


def _listed(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> list[str]:
    return [
        f"{boxes[arrow.source].title} {arrow.shaft * 2} {arrow.label} {arrow.shaft * 2}► "
        f"{boxes[arrow.target].title}"
        for arrow in arrows
    ]
