"""The prompts of requests, read from their submissions. No index keeps them.

Only the submissions are read, from the newest backwards in growing parts, until enough requests are found.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any, Final

from dalsegno.history.summary import Summary
from shared.events import Inputs, MalformedEventError, RequestSubmitted, decode
from shared.log.port import Log
from shared.subjects import Subjects

_FIRST_PART: Final = 64
_GROWTH: Final = 4


def prompt_of(inputs: Inputs) -> str:
    """Return the texts of a request's inputs, one a line; token ids are none."""
    texts = [*_texts([inputs.text or None]), *_texts(inputs.texts or []), *_texts(inputs.queries)]
    return "\n".join([*texts, *(text for message in inputs.messages or [] for text in _contents(message))])


def _texts(values: Iterable[object]) -> Iterator[str]:
    return (value for value in values if isinstance(value, str))


def _contents(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a chat message: its content, or the texts of its parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return _texts(part.get("text") if isinstance(part, dict) else part for part in parts)


async def with_prompt(
    log: Log, subjects: Subjects, newest: Iterable[Summary], accepts: Callable[[str], bool]
) -> AsyncGenerator[Summary, None]:
    """Iterate over the requests whose prompt is accepted; that of an unreadable submission is empty.

    Args:
        log: the log of the requests.
        subjects: its subjects.
        newest: the requests, newest first.
        accepts: tells whether a prompt is accepted.
    """
    left, size = iter(newest), _FIRST_PART
    while part := list(islice(left, size)):
        prompts = _prompts(log, subjects, part)
        async with aclosing(prompts):
            refused = {seq async for seq, prompt in prompts if not accepts(prompt)}
        for summary in part:
            if summary.seq not in refused:
                yield summary
        size *= _GROWTH


async def _prompts(
    log: Log, subjects: Subjects, part: Sequence[Summary]
) -> AsyncGenerator[tuple[int, str], None]:
    """Iterate over the prompts of requests, which are given newest first, by the submission's position."""
    wanted = {summary.seq for summary in part}
    history = log.history([subjects.request("*")], part[-1].seq, part[0].seq)
    async with aclosing(history) as records:
        async for record in records:
            if record.seq not in wanted:
                continue
            event = None
            with contextlib.suppress(MalformedEventError):
                event = decode(record.data, "request")
            yield record.seq, prompt_of(event.inputs) if isinstance(event, RequestSubmitted) else ""
